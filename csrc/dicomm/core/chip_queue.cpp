#include "core/chip_queue.h"

#include <algorithm>

#include "core/clock.h"

namespace dicomm {

bool ChipQueue::is_held(RequestState& request) {
  if (waiting_.contains(key(request))) return true;
  try {
    return request.after && !request.after->done();
  } catch (const std::exception&) {
    return true;  // look() will meet it again, and say so
  }
}

void ChipQueue::push(RequestState& request) {
  if (waiting_.empty()) since_ = Clock::now();
  waiting_[key(request)].push_back(&request);
}

bool ChipQueue::contains(const RequestState& request) const {
  const auto found = waiting_.find(key(request));
  return found != waiting_.end() &&
         std::find(found->second.begin(), found->second.end(), &request) != found->second.end();
}

void ChipQueue::remove(RequestState& request) {
  const auto found = waiting_.find(key(request));
  if (found == waiting_.end()) return;
  std::erase(found->second, &request);
  if (found->second.empty()) waiting_.erase(found);
}

void ChipQueue::remove_all(std::uint32_t context) {
  std::erase_if(waiting_, [&](const auto& queue) { return std::get<2>(queue.first) == context; });
}

// One at a time: what becomes of one may take out others.
void ChipQueue::let_go() {
  std::string failure;
  while (RequestState* request = take(failure)) {
    since_ = Clock::now();  // the next one's work may be a short copy
    failure.empty() ? go_(*request) : fail_(*request, failure.c_str());
    failure.clear();
  }
}

// Takes out one whose chip is through, or has failed; null: there is none.
RequestState* ChipQueue::take(std::string& failure) {
  for (auto& [key, requests] : waiting_) {
    RequestState* const first = requests.front();
    try {
      if (first->after && !first->after->done()) continue;
    } catch (const std::exception& error) {
      failure = error.what();
    }
    first->after.reset();
    remove(*first);
    return first;
  }
  return nullptr;
}

std::optional<ChipQueue::Time> ChipQueue::waits_since() const {
  if (waiting_.empty()) return std::nullopt;
  return since_;
}

}  // namespace dicomm
