// One side of a verbs connection in the making: queue pairs that wait for the peer's card.
#pragma once

#include "transport/verbs/stream.h"

namespace dicomm::verbs {

// Whether at least one rail i of ours reaches rail i of the peer's.
bool reachable(const std::vector<PublishedRail>& mine, const std::vector<PublishedRail>& theirs);

class Endpoint {
 public:
  // Throws Error where no rail reaches the peer.
  Endpoint(std::shared_ptr<Rails> rails, const std::vector<PublishedRail>& theirs);

  const Card& card() const { return card_; }
  void connect(const Card& theirs);  // throws Error
  // The dialler comes last: its peer is ready to receive.
  std::unique_ptr<Stream> stream(Fd socket, bool dialler);

 private:
  std::shared_ptr<Rails> rails_;
  VerbsStream::Links links_;
  Card card_{}, theirs_{};
};

// What a card tells of its rails; empty: the peer does not speak verbs. Throws Error.
std::vector<PublishedRail> published(const Card& card);

}  // namespace dicomm::verbs
