// Sends whose bytes are not there yet, as their chip has work to do before. Those of one peer and
// tag keep their order: one that could go waits for an earlier one that cannot.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/request.h"

namespace dicomm {

// Under the mutex, all of it.
class ChipQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // go: its chip is through; fail: it failed, and said why. Both take any other out, too.
  ChipQueue(std::function<void(RequestState&)> go,
            std::function<void(RequestState&, const char*)> fail)
      : go_(std::move(go)), fail_(std::move(fail)) {}

  // Whether a send that starts has to wait here.
  bool holds_back(RequestState& send) { return (send.after || !waiting_.empty()) && is_held(send); }
  void push(RequestState& send);
  bool contains(const RequestState& send) const;
  void remove(RequestState& send);
  void clear() { waiting_.clear(); }

  // Lets those go that can.
  void look() {
    if (!waiting_.empty()) let_go();
  }
  // Since when, as far as is known, the chip is at what the first ones wait for; nothing but look()
  // learns that it is through.
  std::optional<Time> waits_since() const;

 private:
  using Key = std::pair<int, std::uint64_t>;  // peer, tag

  static Key key(const RequestState& send) { return {send.peer_number, send.tag}; }
  bool is_held(RequestState& send);
  void let_go();
  RequestState* take(std::string& failure);

  const std::function<void(RequestState&)> go_;
  const std::function<void(RequestState&, const char*)> fail_;
  std::map<Key, std::deque<RequestState*>> waiting_;  // no queue is empty
  Time since_{};
};

}  // namespace dicomm
