// One send or receive: what the caller asked, how far it is, how it ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/communicator.h"

namespace dicomm {

class Engine;

enum class Outcome { success, error, peer_error, aborted };

class RequestState final : public Request {
 public:
  RequestState(std::shared_ptr<Engine> engine, bool is_send, void* data, std::size_t bytes,
               int peer, std::uint64_t tag);
  ~RequestState() override;

  bool test() override;
  std::size_t wait(std::optional<std::chrono::milliseconds> timeout) override;
  int peer() const override { return peer_number; }
  std::int64_t delivered_at_ns() const override { return delivered_at; }

  // The rest is the engine's, under its mutex, but for `done`.
  const std::shared_ptr<Engine> engine;
  const bool is_send;
  std::byte* const data;
  const std::size_t bytes;  // to send, or room to receive
  int peer_number;          // any_source until a message matched
  const std::uint64_t tag;
  const std::int64_t posted_at_ns;
  std::int64_t delivered_at = 0;
  std::uint64_t id = 0;   // an offered message's
  std::size_t moved = 0;  // bytes so far; when done, the result
  Outcome outcome = Outcome::success;
  std::string failure;
  std::atomic<bool> done{false};
  RequestState* previous = nullptr;  // in the ledger
  RequestState* next = nullptr;
};

// All unfinished requests, and those who sleep until one of them changes.
class Ledger {
 public:
  void add(RequestState& request);
  void finish(RequestState& request, std::size_t bytes);
  void fail(RequestState& request, Outcome outcome, std::string failure);

  // Visits every unfinished request; `visit` may finish the one it is given.
  template <class F>
  void for_each(F&& visit) {
    for (RequestState* at = first_; at;) {
      RequestState* next = at->next;
      visit(*at);
      at = next;
    }
  }

  std::condition_variable changed;
  int sleepers = 0;
  // Whoever leads sleeps on the transport instead: what it waits for, and how to wake it.
  const RequestState* awaited_by_leader = nullptr;
  std::function<void()> wake_leader;

 private:
  void close(RequestState& request);

  RequestState* first_ = nullptr;
};

}  // namespace dicomm
