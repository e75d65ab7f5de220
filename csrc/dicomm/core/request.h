// One send or receive: what the caller asked, how far it is, how it ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/chip_buffer.h"
#include "core/communicator.h"

namespace dicomm {

class Requests;
class RequestState;

enum class Outcome { success, error, peer_error, aborted };

// Where a request stands in a RequestList.
struct RequestLink {
  RequestState* previous = nullptr;
  RequestState* next = nullptr;
};

// Requests in order, without an allocation for each: they carry the links.
template <RequestLink RequestState::* link>
class RequestList {
 public:
  RequestState* first() const { return first_; }
  static RequestState* after(const RequestState& request) { return (request.*link).next; }
  bool contains(const RequestState& request) const {
    return (request.*link).previous || first_ == &request;
  }

  void push_back(RequestState& request) {
    request.*link = {last_, nullptr};
    (last_ ? (last_->*link).next : first_) = &request;
    last_ = &request;
  }
  void erase(RequestState& request) {
    const RequestLink at = request.*link;
    (at.previous ? (at.previous->*link).next : first_) = at.next;
    (at.next ? (at.next->*link).previous : last_) = at.previous;
    request.*link = {};
  }
  // Visits every request; `visit` may erase the one it is given.
  template <class F>
  void for_each(F&& visit) const {
    for (RequestState* at = first_; at;) {
      RequestState* next = after(*at);
      visit(*at);
      at = next;
    }
  }

 private:
  RequestState* first_ = nullptr;
  RequestState* last_ = nullptr;
};

class RequestState final : public Request {
 public:
  // owner: null until it is started, for one that its caller keeps. peer: a world rank, or until
  // then a rank of the communicator that will start it.
  RequestState(std::shared_ptr<Requests> owner, bool is_send, void* data, std::size_t bytes,
               int peer, std::uint64_t tag);
  ~RequestState() override;

  bool finished() const override { return done.load(std::memory_order_acquire); }
  bool test() override;
  std::size_t wait(std::optional<std::chrono::milliseconds> timeout) override;
  int peer() const override;
  std::int64_t delivered_at_ns() const override { return delivered_at; }

  // The rest is the engine's, under its mutex, but for `done`.
  std::shared_ptr<Requests> owner;
  std::shared_ptr<ChipBuffer> chip;  // where the buffer is in a chip's memory
  std::shared_ptr<ChipWork> after;   // what its chip must have done before it goes on
  const bool is_send;
  std::byte* data;          // null: see chip
  const std::size_t bytes;  // to send, or room to receive
  int peer_number;          // a world rank; any_source until a message matched
  std::uint32_t context = 0;
  const std::uint64_t tag;
  std::int64_t posted_at_ns = 0;  // 0: it did not have to wait yet
  std::int64_t delivered_at = 0;
  std::uint32_t id = 0;                // an offered message's
  std::size_t moved = 0;               // bytes so far; when done, the result
  Outcome outcome = Outcome::success;  // of one that is not done: how it ends once it is let go
  std::string failure;
  std::chrono::steady_clock::time_point
      release_by{};  // then its peer is cut off, where outcome is set
  std::atomic<bool> done{false};
  std::chrono::nanoseconds age() const;
  // The buffer, or the host's in its place: see ChipBuffer::on_host().
  std::byte* on_host() {
    if (!data && chip) {
      auto [host, copy] = chip->on_host();
      data = host;
      after = std::move(copy);
    }
    return data;
  }
  RequestLink in_ledger, in_matcher;
};

// All unfinished requests, and those who sleep until one of them changes.
class Ledger {
 public:
  void add(RequestState& request);
  void finish(RequestState& request, std::size_t bytes);
  void fail(RequestState& request, Outcome outcome, std::string failure);
  // The same for one whose buffer is still in use: finish() ends it.
  static void doom(RequestState& request, Outcome outcome, std::string failure);

  // Visits every unfinished request; `visit` may finish the one it is given.
  template <class F>
  void for_each(F&& visit) {
    unfinished_.for_each(visit);
  }

  // Whether a request of that communicator is unfinished.
  bool holds(std::uint32_t context) const {
    bool found = false;
    unfinished_.for_each([&](const RequestState& request) { found |= request.context == context; });
    return found;
  }

  std::condition_variable changed;
  int sleepers = 0;
  // Whoever leads sleeps on the transport instead: what it waits for, and how to wake it.
  const RequestState* awaited_by_leader = nullptr;
  std::function<void()> wake_leader;

 private:
  void close(RequestState& request);

  RequestList<&RequestState::in_ledger> unfinished_;
};

}  // namespace dicomm
