// Queue pairs connected by rdma_cm: the kernel's connection manager finds the way to the peer (GID,
// hop limit, priority, MTU, by the routing table) and carries the queue pairs' numbers.
//
// The acceptor listens on its rail's address while the connection is in the making, and tells the
// port and a nonce in its card; who calls without the nonce is rejected. The queue pairs stay our
// own, with our device's memory: rdma_cm only says how to connect them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/verbs/cm_library.h"
#include "transport/verbs/link.h"

namespace dicomm::verbs {

// The rails of one connection that rdma_cm connects. Nothing here blocks.
class CmMeeting {
 public:
  explicit CmMeeting(std::shared_ptr<const cm::Library> library);  // throws Error

  // The acceptor: the card says from here on where to call. Throws Error.
  void listen(std::size_t rail, const Link& link, RailCard& card);
  // The dialler.
  void call(std::size_t rail, const Link& link, const RailCard& theirs);

  int fd() const { return channel_->fd; }  // readable: advance() has something to do
  void advance();

  bool has(std::size_t rail) const { return rail < rails_.size() && rails_[rail].link; }
  bool empty() const { return rails_.empty(); }
  bool calling() const;  // some call has neither been answered nor failed
  // How to connect the queue pair: the call was answered, or accepted. Null: not so.
  const ibv::QpAttributes* route(std::size_t rail) const;
  // Why not, or what it still waits for.
  std::string failure(std::size_t rail) const;
  // The dialler's queue pair is connected. Throws Error.
  void establish(std::size_t rail);
  // To be kept for as long as the queue pair.
  std::shared_ptr<cm::Id> id(std::size_t rail) const { return rails_[rail].id; }

 private:
  struct Rail {
    const Link* link = nullptr;
    CmNonce nonce{};  // the acceptor's
    cm::Parameters parameters{};
    std::shared_ptr<cm::Id> listener, id;
    sockaddr_storage to{};  // the dialler's
    const char* step = "";
    bool connectable = false;
    ibv::QpAttributes route{};
    std::string failure;
  };

  Rail& add(std::size_t rail, const Link& link, const CmNonce& nonce);
  std::shared_ptr<cm::Id> create_id();
  std::shared_ptr<cm::Id> owned(cm::Id* id) const;
  void caller(Rail& rail, std::shared_ptr<cm::Id> id, bool knows_nonce);
  void resolve_address(Rail& rail);
  void progress(Rail& rail, cm::EventType event, int status);
  void find_route(Rail& rail, cm::Id* id) const;
  ibv::QpAttributes attributes(cm::Id* id, ibv::QpState state) const;

  std::shared_ptr<const cm::Library> library_;
  std::shared_ptr<cm::Channel> channel_;
  std::vector<Rail> rails_;
};

}  // namespace dicomm::verbs
