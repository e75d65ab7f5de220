// What ranks write to the store of their job, with a seal that only they can make.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/communicator.h"

namespace dicomm {

// In time there was only what nobody of this job wrote.
class Unsealed : public TimeoutError {
 public:
  using TimeoutError::TimeoutError;
};

// Whoever reaches the store can write to it. A value without a true seal, or with that of another
// key, is told once and never believed: get() goes on to wait, for the rank to overwrite it.
class SealedStore final : public Store {
 public:
  SealedStore(std::shared_ptr<Store> store, std::string secret);

  void set(const std::string& key, const std::string& value) override;
  // Throws Unsealed, too, and Error once an untrue value has stood there for long.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;

 private:
  using Time = std::chrono::steady_clock::time_point;

  std::string seal(const std::string& key, const std::string& value) const;
  Time untrue_since(const std::string& key);

  const std::shared_ptr<Store> store_;
  const std::string secret_;
  std::mutex mutex_;
  std::map<std::string, Time> untrue_;  // keys that somebody without the secret wrote
};

}  // namespace dicomm
