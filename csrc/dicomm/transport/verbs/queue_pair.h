// One reliable connection on one rail: its queue pair, and the queue where its work ends.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "core/fork.h"
#include "transport/verbs/device.h"
#include "transport/verbs/wire.h"

namespace dicomm::verbs {

// A device takes no more work on a rail: that rail is lost.
class RailError : public Error {
 public:
  using Error::Error;
};

struct QueueDepths {
  std::uint32_t sends;
  std::uint32_t receives;  // that may have ended and not been polled
};

class QueuePair {
 public:
  // Ready for receive buffers, its own or those of a shared queue. Throws Error.
  QueuePair(const Rail& rail, const Settings& settings, const QueueDepths& depths,
            ibv::Srq* shared_receives = nullptr);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  // What the peer must know. `gid` is the one it is to send to.
  RailCard card(const GidEntry* gid) const;
  // The way to the peer's queue pair as the cards tell it: addresses, numbers and MTU.
  ibv::QpAttributes route(const RailCard& theirs, const GidEntry* gid) const;
  // To the peer's queue pair. Throws Error.
  void connect(const RailCard& theirs, const ibv::QpAttributes& route);
  // Nothing new begins; what is under way ends soon, flushed: poll() tells. (Destroying would
  // do, too, but may take a driver long where the cable is gone.)
  void close();
  bool closed() const { return closed_; }
  void destroy();  // the surer way, which may take long

  void post(ibv::SendRequest* first);                                     // throws RailError
  int post(ibv::ReceiveRequest* first) { return ibv::post(qp_, first); }  // an errno, or 0
  int poll(ibv::Completion* completions, int count) { return ibv::poll(cq_, count, completions); }

  // The descriptor turns readable at the first completion after arm().
  int fd() const { return channel_->fd; }
  void arm();
  void collect_events();

  std::uint32_t inline_bytes() const { return inline_bytes_; }
  std::uint32_t reads_out() const { return reads_out_; }  // READs at a time; after connect()
  int mtu_bytes() const { return 128 << mtu_; }
  std::uint32_t number() const { return qp_->number; }
  const Rail& rail() const { return rail_; }
  const Settings& settings() const { return settings_; }

 private:
  void modify(ibv::QpAttributes& attributes, int mask, const char* step);
  void reset();

  const Rail& rail_;
  const Settings& settings_;
  const ibv::Library& library_;
  ibv::Channel* channel_ = nullptr;
  std::optional<ClosedInChildren> channel_fd_;
  ibv::Cq* cq_ = nullptr;
  ibv::Qp* qp_ = nullptr;
  std::uint32_t psn_ = 0;
  std::uint32_t inline_bytes_ = 0;
  std::uint32_t reads_out_ = 0;
  int mtu_ = 1;
  bool armed_ = false;
  bool closed_ = false;
};

}  // namespace dicomm::verbs
