#include <thread>
#include <utility>

#include "chip.h"

namespace async_chip {

void Mark::happen() {
  std::lock_guard lock(mutex_);
  happened_ = true;
  happened_at_ns_ =
      std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  changed_.notify_all();
}

bool Mark::has_happened() {
  std::lock_guard lock(mutex_);
  return happened_;
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return happened_; });
}

void Mark::wait_for(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [this] { return happened_; });
}

std::int64_t Mark::happened_at_ns() {
  std::lock_guard lock(mutex_);
  return happened_at_ns_;
}

Queue::Queue(unsigned number) : random_(setting("ASYNC_CHIP_SEED", 1) * 1000 + number) {}

void Queue::submit(Work work) { put({std::move(work), true}); }

std::shared_ptr<Mark> Queue::mark() {
  auto mark = std::make_shared<Mark>();
  put({[mark] { mark->happen(); }, false});
  return mark;
}

bool Queue::is_idle() {
  std::lock_guard lock(mutex_);
  return entries_.empty() && !busy_;
}

// The thread starts with the first work, so that a process which only loaded the library may fork.
void Queue::put(Entry entry) {
  std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
  if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
  changed_.notify_all();
}

// Half of the work is done at once, so that streams overtake each other both ways.
std::chrono::microseconds Queue::delay() {
  static const unsigned most = setting("ASYNC_CHIP_DELAY_US", 300);
  const auto drawn = random_();
  return std::chrono::microseconds(drawn % 2 ? drawn / 2 % (most + 1) : 0);
}

void Queue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !entries_.empty(); });
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    busy_ = entry.is_delayed;  // who has waited for a mark finds the stream idle
    lock.unlock();
    if (entry.is_delayed) std::this_thread::sleep_for(delay());
    entry.work();
    entry.work = nullptr;
    lock.lock();
    busy_ = false;
  }
}

}  // namespace async_chip
