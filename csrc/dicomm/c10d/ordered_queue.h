// Runs jobs one at a time in the order they were submitted.
//
// Whoever waits for a job runs what is due up to it on its own thread, so that a collective that
// is waited for at once costs no thread switch; jobs meant to overlap are handed to a worker
// thread, which starts when first needed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace dicomm {

class OrderedQueue {
 public:
  using Job = std::function<void()>;  // must not throw

  ~OrderedQueue() { stop(); }

  // Returns the job's number; numbers count up from 1.
  std::uint64_t submit(Job job);
  // Hands everything submitted so far to the worker.
  void hand_over();
  // Returns when job `number` has run, here or on the worker.
  void run_until(std::uint64_t number);
  // The same for everything submitted so far.
  void run_all();
  // Waits for another thread to run it; false after `timeout`.
  bool wait_for(std::uint64_t number, std::chrono::milliseconds timeout);
  // Runs what is left and ends the worker. Idempotent.
  void stop();

 private:
  void run_next(std::unique_lock<std::mutex>& lock);
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::uint64_t submitted_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t handed_over_ = 0;  // the worker's share: jobs up to this number
  bool running_ = false;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace dicomm
