#include "core/chip_queue.h"

#include <algorithm>

#include "core/clock.h"

namespace dicomm {

bool ChipQueue::is_held(RequestState& send) {
  if (waiting_.contains(key(send))) return true;
  try {
    return send.after && !send.after->done();
  } catch (const std::exception&) {
    return true;  // look() will meet it again, and say so
  }
}

void ChipQueue::push(RequestState& send) {
  if (waiting_.empty()) since_ = Clock::now();
  waiting_[key(send)].push_back(&send);
}

bool ChipQueue::contains(const RequestState& send) const {
  const auto found = waiting_.find(key(send));
  return found != waiting_.end() &&
         std::find(found->second.begin(), found->second.end(), &send) != found->second.end();
}

void ChipQueue::remove(RequestState& send) {
  const auto found = waiting_.find(key(send));
  if (found == waiting_.end()) return;
  std::erase(found->second, &send);
  if (found->second.empty()) waiting_.erase(found);
}

// One at a time: what becomes of one may take out others.
void ChipQueue::let_go() {
  std::string failure;
  while (RequestState* send = take(failure)) {
    since_ = Clock::now();  // the next one's work may be a short copy
    failure.empty() ? go_(*send) : fail_(*send, failure.c_str());
    failure.clear();
  }
}

// Takes out one whose chip is through, or has failed; null: there is none.
RequestState* ChipQueue::take(std::string& failure) {
  for (auto& [key, sends] : waiting_) {
    RequestState* const first = sends.front();
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
