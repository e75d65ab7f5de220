// The requests of one collective, in memory that is kept between calls.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/request.h"

namespace dicomm {

class RequestPool {
 public:
  RequestPool() {
    auto& kept = kept_slots();
    if (kept.empty()) return;
    slots_ = std::move(kept.back());
    kept.pop_back();
  }
  // Cancels those that are unfinished.
  ~RequestPool() {
    for (std::size_t i = 0; i < used_; ++i) slots_[i]->reset();
    kept_slots().push_back(std::move(slots_));
  }
  RequestPool(const RequestPool&) = delete;
  RequestPool& operator=(const RequestPool&) = delete;

  // Stays where it is.
  RequestState& add(bool is_send, void* data, std::size_t bytes, int peer, std::uint64_t tag) {
    if (used_ == slots_.size()) slots_.push_back(std::make_unique<Slot>());
    return slots_[used_++]->emplace(nullptr, is_send, data, bytes, peer, tag);
  }
  std::size_t size() const { return used_; }
  RequestState& operator[](std::size_t i) const { return **slots_[i]; }

 private:
  using Slot = std::optional<RequestState>;
  using Slots = std::vector<std::unique_ptr<Slot>>;

  static std::vector<Slots>& kept_slots() {
    static thread_local std::vector<Slots> kept;
    return kept;
  }

  Slots slots_;
  std::size_t used_ = 0;
};

}  // namespace dicomm
