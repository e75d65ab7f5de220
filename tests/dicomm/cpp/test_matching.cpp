#include <doctest/doctest.h>

#include "core/matching.h"
#include "support.h"

using namespace dicomm;

namespace {

// Finished from the start: no engine is needed to let go of it.
struct Receive {
  Receive(int peer, std::uint64_t tag) : state(nullptr, false, nullptr, 0, peer, tag) {
    state.done = true;
  }
  RequestState state;
};

std::shared_ptr<Arrival> arrival(int peer, std::uint64_t tag, std::uint64_t id = 0) {
  auto result = std::make_shared<Arrival>();
  result->peer = peer;
  result->tag = tag;
  result->id = id;
  return result;
}

}  // namespace

TEST_CASE("a message goes to the first receive that was posted for it") {
  Matcher matcher;
  Receive other_tag(1, 8), other_peer(2, 7), any(Communicator::any_source, 7), exact(1, 7);
  for (Receive* receive : {&other_tag, &other_peer, &any, &exact}) matcher.post(receive->state);
  CHECK(matcher.match(1, 7) == &any.state);
  CHECK(any.state.peer_number == 1);
  CHECK(matcher.match(1, 7) == &exact.state);
  CHECK(matcher.match(1, 7) == nullptr);
  CHECK(matcher.match(2, 7) == &other_peer.state);
  CHECK(matcher.match(1, 8) == &other_tag.state);
}

TEST_CASE("a receive gets the first message that came for it") {
  Matcher matcher;
  for (const auto& message :
       {arrival(2, 7, 1), arrival(1, 7, 2), arrival(1, 7, 3), arrival(1, 8, 4)})
    matcher.keep(message);
  CHECK(matcher.match(Receive(1, 7).state)->id == 2);
  CHECK(matcher.match(Receive(Communicator::any_source, 7).state)->id == 1);
  CHECK(matcher.match(Receive(Communicator::any_source, 7).state)->id == 3);
  CHECK(matcher.match(Receive(Communicator::any_source, 7).state) == nullptr);
  CHECK(matcher.match(Receive(1, 8).state)->id == 4);
}

TEST_CASE("what a peer that is gone cannot complete is forgotten, what came whole is kept") {
  Matcher matcher;
  auto offer = arrival(1, 7, 1);
  offer->offered = true;
  auto whole = arrival(1, 7, 2);
  whole->complete = true;
  auto half = arrival(1, 7, 3);
  auto of_another = arrival(2, 7, 4);
  for (const auto& message : {offer, half, whole, of_another}) matcher.keep(message);
  matcher.remove_incomplete(1);
  CHECK(matcher.match(Receive(1, 7).state) == whole);
  CHECK(matcher.match(Receive(1, 7).state) == nullptr);
  CHECK(matcher.match(Receive(2, 7).state) == of_another);
}

TEST_CASE("an offer is taken back once, a receive removed once") {
  Matcher matcher;
  auto offer = arrival(1, 7, 5);
  offer->offered = true;
  matcher.keep(offer);
  CHECK_FALSE(matcher.remove_offer(2, 5));
  CHECK(matcher.remove_offer(1, 5));
  CHECK_FALSE(matcher.remove_offer(1, 5));
  Receive receive(1, 7);
  matcher.post(receive.state);
  CHECK(matcher.remove(receive.state));
  CHECK_FALSE(matcher.remove(receive.state));
  CHECK(matcher.match(1, 7) == nullptr);
}
