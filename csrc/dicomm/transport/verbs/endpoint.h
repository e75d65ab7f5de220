// One side of a verbs connection in the making: queue pairs that wait for the peer's card.
//
//   dialler    tells its card; connect(), and, where not finished() by that, call()
//   acceptor   listen(), connect(), tells its card; where not finished() by that, answer()
#pragma once

#include "core/deadline.h"
#include "transport/verbs/cm.h"
#include "transport/verbs/stream.h"

namespace dicomm::verbs {

// Whether at least one rail i of ours reaches rail i of the peer's.
bool reachable(const std::vector<PublishedRail>& mine, const std::vector<PublishedRail>& theirs);

class Endpoint {
 public:
  // Throws Error where no rail reaches the peer.
  Endpoint(std::shared_ptr<Rails> rails, const std::vector<PublishedRail>& theirs);

  const Card& card() const { return card_; }
  // For calls to the rails that rdma_cm is to connect; card() says where. Throws Error.
  void listen();
  // The other rails, or all; a dialler's calls begin. Throws Error.
  void connect(const Card& theirs);
  bool finished() const { return !cm_; }
  // The rails of rdma_cm; where it fails on one, the cards connect that, too, unless a side will
  // have rdma_cm only. These wait for the peer. Throw Error.
  void call(const Fd& socket, const Deadline& deadline);
  void answer(const Fd& socket, const Deadline& deadline);

  // The dialler comes last: its peer is ready to receive. Throws Error.
  std::unique_ptr<Stream> stream(Fd socket, bool dialler);

 private:
  void give_up_cm(std::size_t rail, const std::string& reason);
  bool insists_on_cm() const;
  void dismiss(const Fd& socket);

  std::shared_ptr<Rails> rails_;
  VerbsStream::Links links_;
  Card card_{}, theirs_{};
  std::unique_ptr<CmMeeting> cm_;
  bool caller_waits_ = false;
};

// What a card tells of its rails; empty: the peer does not speak verbs. Throws Error.
std::vector<PublishedRail> published(const Card& card);

}  // namespace dicomm::verbs
