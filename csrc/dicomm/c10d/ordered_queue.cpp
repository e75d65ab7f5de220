#include "ordered_queue.h"

#include "core/clock.h"

namespace dicomm {

std::uint64_t OrderedQueue::submit(Job job) {
  std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  return ++submitted_;
}

void OrderedQueue::hand_over() {
  std::lock_guard lock(mutex_);
  if (handed_over_ == submitted_ || stopping_) return;
  handed_over_ = submitted_;
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
}

void OrderedQueue::run_until(std::uint64_t number) {
  std::unique_lock lock(mutex_);
  while (finished_ < number) {
    if (running_)
      changed_.wait(lock);
    else
      run_next(lock);
  }
}

void OrderedQueue::run_all() {
  std::uint64_t last;
  {
    std::lock_guard lock(mutex_);
    last = submitted_;
  }
  run_until(last);
}

bool OrderedQueue::wait_for(std::uint64_t number, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline_after(timeout), [&] { return finished_ >= number; });
}

void OrderedQueue::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  run_all();
  if (worker_.joinable()) worker_.join();
}

void OrderedQueue::run_next(std::unique_lock<std::mutex>& lock) {
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  running_ = true;
  lock.unlock();
  job();
  job = nullptr;  // lets go of its tensors without the lock
  lock.lock();
  running_ = false;
  ++finished_;
  changed_.notify_all();
}

void OrderedQueue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || (!running_ && finished_ < handed_over_); });
    if (stopping_) return;
    run_next(lock);
  }
}

}  // namespace dicomm
