#include "core/matching.h"

#include <algorithm>

namespace dicomm {

RequestState* Matcher::match(int peer, std::uint64_t tag, std::uint32_t context) {
  auto& posted = bucket(tag, context).posted;
  for (RequestState* receive = posted.first(); receive; receive = posted.after(*receive)) {
    if (receive->tag != tag || receive->context != context) continue;
    if (receive->peer_number != peer && receive->peer_number != Communicator::any_source) continue;
    posted.erase(*receive);
    receive->peer_number = peer;
    return receive;
  }
  return nullptr;
}

std::shared_ptr<Arrival> Matcher::match(const RequestState& receive) {
  auto& arrived = bucket(receive.tag, receive.context).arrived;
  const int peer = receive.peer_number;
  const auto found = std::find_if(arrived.begin(), arrived.end(), [&](const auto& arrival) {
    return arrival->tag == receive.tag && arrival->context == receive.context &&
           (arrival->peer == peer || peer == Communicator::any_source);
  });
  if (found == arrived.end()) return nullptr;
  auto arrival = std::move(*found);
  arrived.erase(found);
  return arrival;
}

void Matcher::keep(std::shared_ptr<Arrival> arrival) {
  auto& arrived = bucket(arrival->tag, arrival->context).arrived;
  arrived.push_back(std::move(arrival));
}

std::vector<std::shared_ptr<Arrival>> Matcher::end(std::uint32_t context) {
  ended_.insert(context);
  std::vector<std::shared_ptr<Arrival>> unwanted;
  for (Bucket& bucket : buckets_) {
    bucket.posted.for_each([&](RequestState& receive) {
      if (receive.context == context) bucket.posted.erase(receive);
    });
    std::erase_if(bucket.arrived, [&](const auto& arrival) {
      const bool of_it = arrival->context == context;
      if (of_it) unwanted.push_back(arrival);
      return of_it;
    });
  }
  return unwanted;
}

bool Matcher::remove(RequestState& receive) {
  auto& posted = bucket(receive.tag, receive.context).posted;
  if (!posted.contains(receive)) return false;
  posted.erase(receive);
  return true;
}

bool Matcher::remove_offer(int peer, std::uint32_t id) {
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
