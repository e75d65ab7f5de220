// torch.distributed's store as dicomm's.
#pragma once

#include <algorithm>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/communicator.h"

namespace dicomm {

class TorchStore : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    guarded(key, [&] { store_->set(key, value); });
  }

  // Polls: a blocking wait would lock the one connection that all groups of a process share, and
  // with it other threads that have something to tell.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::chrono::microseconds pause(200);
    while (true) {
      std::string value;
      bool found = false;
      guarded(key, [&] {
        if ((found = store_->check({key}))) value = store_->get_to_str(key);
      });
      if (found) return value;
      if (std::chrono::steady_clock::now() >= deadline)
        throw TimeoutError("store: no key '" + key + "' after " + std::to_string(timeout.count()) +
                           " ms");
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(20'000));
    }
  }

 private:
  template <class F>
  static void guarded(const std::string& key, F&& function) {
    try {
      function();
    } catch (const c10::Error& error) {
      throw Error("store: key '" + key + "': " + error.what_without_backtrace());
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace dicomm
