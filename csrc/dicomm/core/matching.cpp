#include "core/matching.h"

#include <algorithm>

namespace dicomm {

RequestState* Matcher::match(int peer, std::uint64_t tag) {
  auto& posted = bucket(tag).posted;
  for (RequestState* receive = posted.first(); receive; receive = posted.after(*receive)) {
    if (receive->tag != tag) continue;
    if (receive->peer_number != peer && receive->peer_number != Communicator::any_source) continue;
    posted.erase(*receive);
    receive->peer_number = peer;
    return receive;
  }
  return nullptr;
}

std::shared_ptr<Arrival> Matcher::match(const RequestState& receive) {
  auto& arrived = bucket(receive.tag).arrived;
  const int peer = receive.peer_number;
  const auto found = std::find_if(arrived.begin(), arrived.end(), [&](const auto& arrival) {
    return arrival->tag == receive.tag &&
           (arrival->peer == peer || peer == Communicator::any_source);
  });
  if (found == arrived.end()) return nullptr;
  auto arrival = std::move(*found);
  arrived.erase(found);
  return arrival;
}

void Matcher::keep(std::shared_ptr<Arrival> arrival) {
  auto& arrived = bucket(arrival->tag).arrived;
  arrived.push_back(std::move(arrival));
}

void Matcher::clear() {
  for (Bucket& bucket : buckets_) {
    while (RequestState* receive = bucket.posted.first()) bucket.posted.erase(*receive);
    bucket.arrived.clear();
  }
}

bool Matcher::remove(RequestState& receive) {
  auto& posted = bucket(receive.tag).posted;
  if (!posted.contains(receive)) return false;
  posted.erase(receive);
  return true;
}

bool Matcher::remove_offer(int peer, std::uint64_t id) {
  return remove_arrivals([&](const Arrival& arrival) {
    return arrival.offered && arrival.peer == peer && arrival.id == id;
  });
}

void Matcher::remove_incomplete(int peer) {
  remove_arrivals([&](const Arrival& arrival) {
    return arrival.peer == peer && (arrival.offered || !arrival.complete);
  });
}

template <class F>
bool Matcher::remove_arrivals(F&& unwanted) {
  bool found = false;
  for (Bucket& bucket : buckets_)
    found |= bucket.arrived.remove_if([&](const auto& arrival) { return unwanted(*arrival); }) > 0;
  return found;
}

}  // namespace dicomm
