// A Store for ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "core/communicator.h"

namespace dicomm {

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; }))
      throw TimeoutError("no key " + key);
    return values_[key];
  }
  void clear() {
    std::lock_guard lock(mutex_);
    values_.clear();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace dicomm
