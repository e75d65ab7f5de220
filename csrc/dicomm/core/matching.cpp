#include "core/matching.h"

#include <algorithm>

namespace dicomm {

RequestState* Matcher::match(int peer, std::uint64_t tag) {
  const auto queues = tags_.find(tag);
  if (queues == tags_.end()) return nullptr;
  auto& posted = queues->second.posted;
  const auto found = std::find_if(posted.begin(), posted.end(), [&](const RequestState* receive) {
    return receive->peer_number == peer || receive->peer_number == Communicator::any_source;
  });
  if (found == posted.end()) return nullptr;
  RequestState* receive = *found;
  posted.erase(found);
  if (queues->second.empty()) tags_.erase(queues);
  receive->peer_number = peer;
  return receive;
}

std::shared_ptr<Arrival> Matcher::match(const RequestState& receive) {
  const auto queues = tags_.find(receive.tag);
  if (queues == tags_.end()) return nullptr;
  auto& arrived = queues->second.arrived;
  const int peer = receive.peer_number;
  const auto found = std::find_if(arrived.begin(), arrived.end(), [&](const auto& arrival) {
    return arrival->peer == peer || peer == Communicator::any_source;
  });
  if (found == arrived.end()) return nullptr;
  auto arrival = std::move(*found);
  arrived.erase(found);
  if (queues->second.empty()) tags_.erase(queues);
  return arrival;
}

void Matcher::post(RequestState& receive) { tags_[receive.tag].posted.push_back(&receive); }

void Matcher::keep(std::shared_ptr<Arrival> arrival) {
  auto& arrived = tags_[arrival->tag].arrived;
  arrived.push_back(std::move(arrival));
}

bool Matcher::remove(RequestState& receive) {
  const auto queues = tags_.find(receive.tag);
  if (queues == tags_.end()) return false;
  const bool found = queues->second.posted.remove(&receive) > 0;
  if (queues->second.empty()) tags_.erase(queues);
  return found;
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
  for (auto at = tags_.begin(); at != tags_.end();) {
    auto& arrived = at->second.arrived;
    found |= arrived.remove_if([&](const auto& arrival) { return unwanted(*arrival); }) > 0;
    at = at->second.empty() ? tags_.erase(at) : std::next(at);
  }
  return found;
}

}  // namespace dicomm
