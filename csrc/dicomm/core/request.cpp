#include "core/request.h"

#include "core/clock.h"
#include "core/engine.h"

namespace dicomm {

RequestState::RequestState(std::shared_ptr<Engine> engine, bool is_send, void* data,
                           std::size_t bytes, int peer, std::uint64_t tag)
    : engine(std::move(engine)),
      is_send(is_send),
      data(static_cast<std::byte*>(data)),
      bytes(bytes),
      peer_number(peer),
      tag(tag) {}

RequestState::~RequestState() {
  if (engine && !finished() && engine->is_here()) engine->requests().cancel(*this);
}

std::chrono::nanoseconds RequestState::age() const {
  return std::chrono::nanoseconds(posted_at_ns == 0 ? 0 : now_ns() - posted_at_ns);
}

bool RequestState::test() {
  if (!finished()) {
    engine->require_here();
    engine->progress().poll(*this);
  }
  if (!finished()) return false;
  wait(std::nullopt);
  return true;
}

std::size_t RequestState::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (!finished()) {
    engine->require_here();
    engine->requests().wait(*this, timeout);
  }
  switch (outcome) {
    case Outcome::error:
      throw Error(failure);
    case Outcome::peer_error:
      throw PeerError(failure);
    case Outcome::aborted:
      throw AbortedError(failure);
    case Outcome::success:
      break;
  }
  return moved;
}

void Ledger::add(RequestState& request) { unfinished_.push_back(request); }

void Ledger::finish(RequestState& request, std::size_t bytes) {
  request.moved = bytes;
  close(request);
}

void Ledger::fail(RequestState& request, Outcome outcome, std::string failure) {
  request.outcome = outcome;
  request.failure = std::move(failure);
  close(request);
}

// `done` comes last: its owner may destroy the request from then on.
void Ledger::close(RequestState& request) {
  unfinished_.erase(request);
  if (sleepers > 0) changed.notify_all();
  if (awaited_by_leader == &request) wake_leader();
  request.done.store(true, std::memory_order_release);
}

}  // namespace dicomm
