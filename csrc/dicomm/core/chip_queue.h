// Sends whose bytes are not there yet, and receives whose buffer is still used, as their chip has
// work to do before. Sends of one peer and tag keep their order, and receives of one tag: one that
// could go waits for an earlier one that cannot. Each communicator has its own tags.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
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

  // Whether one that starts has to wait here.
  bool holds_back(RequestState& request) {
    return (request.after || !waiting_.empty()) && is_held(request);
  }
  void push(RequestState& request);
  bool contains(const RequestState& request) const;
  void remove(RequestState& request);
  void remove_all(std::uint32_t context);

  // Lets those go that can.
  void look() {
    if (!waiting_.empty()) let_go();
  }
  bool empty() const { return waiting_.empty(); }
  // Since when, as far as is known, the chip is at what the first ones wait for; nothing but look()
  // learns that it is through.
  std::optional<Time> waits_since() const;

 private:
  // Whether it sends, to which peer, the communicator and the tag.
  using Key = std::tuple<bool, int, std::uint32_t, std::uint64_t>;

  static Key key(const RequestState& request) {
    return {request.is_send, request.is_send ? request.peer_number : 0, request.context,
            request.tag};
  }
  bool is_held(RequestState& request);
  void let_go();
  RequestState* take(std::string& failure);

  const std::function<void(RequestState&)> go_;
  const std::function<void(RequestState&, const char*)> fail_;
  std::map<Key, std::deque<RequestState*>> waiting_;  // no queue is empty
  Time since_{};
};

}  // namespace dicomm
