// The one mutex that guards all of a communicator's parts.
#pragma once

#include <atomic>
#include <mutex>

namespace dicomm {

using Lock = std::unique_lock<std::mutex>;

struct Guard {
  std::mutex mutex;
  std::atomic<int> wanting{
      0};  // threads in lock(): one that spins with the mutex gives way to them

  // For the calls that start and end requests; the others take the mutex itself.
  Lock lock() {
    Lock lock(mutex, std::try_to_lock);
    if (!lock) {
      ++wanting;
      lock.lock();
      --wanting;
    }
    return lock;
  }
};

}  // namespace dicomm
