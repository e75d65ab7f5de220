// torch.distributed's store as dicomm's.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/clock.h"
#include "core/communicator.h"

namespace dicomm {

class TorchStore : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)), is_torchs_server_(is_torchs_server(store_)) {}

  void set(const std::string& key, const std::string& value) override {
    guarded(key, [&] { store_->set(key, value); });
  }

  // Polls: a blocking wait would lock the one connection that all groups of a process share, and
  // with it other threads that have something to tell. The pauses grow, so that waiting costs few
  // requests, five a second at last: thousands of ranks may wait for one.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = deadline_after(timeout);
    auto pause = kFirstPause;
    while (true) {
      std::optional<std::string> value;
      guarded(key, [&] { value = find(key); });
      if (value) return *value;
      const auto now = std::chrono::steady_clock::now();
      if (now >= deadline)
        throw TimeoutError("store: no key '" + key + "' after " + std::to_string(timeout.count()) +
                           " ms");
      std::this_thread::sleep_until(std::min<decltype(deadline)>(now + pause, deadline));
      pause = std::min(2 * pause, kLongestPause);
    }
  }

 private:
  static constexpr std::chrono::milliseconds kFirstPause{1}, kLongestPause{200};

  // A job's only server answers every rank: there a key is found by one request in place of three.
  std::optional<std::string> find(const std::string& key) {
    if (is_torchs_server_) {
      const std::string value = store_->compareSet(key, nothing_, nothing_);
      return value == nothing_ ? std::nullopt : std::optional(value);
    }
    if (!store_->check({key})) return std::nullopt;
    return store_->get_to_str(key);
  }

  static std::string random_word() {
    std::random_device random;
    return std::to_string(random()) + std::to_string(random()) + std::to_string(random());
  }

  static bool is_torchs_server(c10::intrusive_ptr<c10d::Store> store) {
    while (auto* part = dynamic_cast<c10d::PrefixStore*>(store.get()))
      store = part->getUnderlyingStore();
    return dynamic_cast<c10d::TCPStore*>(store.get()) != nullptr;
  }

  template <class F>
  static void guarded(const std::string& key, F&& function) {
    try {
      function();
    } catch (const c10::Error& error) {
      throw Error("store: key '" + key + "': " + error.what_without_backtrace());
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const bool is_torchs_server_;
  const std::string nothing_ = random_word();  // what nobody writes
};

}  // namespace dicomm
