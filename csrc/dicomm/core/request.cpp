#include "core/request.h"

#include "core/clock.h"
#include "core/engine.h"
#include "core/requests.h"

namespace dicomm {

RequestState::RequestState(std::shared_ptr<Requests> owner, bool is_send, void* data,
                           std::size_t bytes, int peer, std::uint64_t tag)
    : owner(std::move(owner)),
      is_send(is_send),
      data(static_cast<std::byte*>(data)),
      bytes(bytes),
      peer_number(peer),
      tag(tag) {}

RequestState::~RequestState() {
  if (owner && !finished() && owner->engine().is_here()) owner->cancel(*this);
}

int RequestState::peer() const { return owner ? owner->rank_of(peer_number) : peer_number; }

std::chrono::nanoseconds RequestState::age() const {
  return std::chrono::nanoseconds(posted_at_ns == 0 ? 0 : now_ns() - posted_at_ns);
}

bool RequestState::test() {
  if (!finished()) {
    owner->engine().require_here();
    owner->engine().progress().poll(*this);
  }
  if (!finished()) return false;
  wait(std::nullopt);
  return true;
}

std::size_t RequestState::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (!finished()) {
    owner->engine().require_here();
    owner->wait(*this, timeout);
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
  doom(request, outcome, std::move(failure));
  close(request);
}

void Ledger::doom(RequestState& request, Outcome outcome, std::string failure) {
  request.outcome = outcome;
  request.failure = std::move(failure);
}

// `done` comes last: its owner may destroy the request from then on.
void Ledger::close(RequestState& request) {
  unfinished_.erase(request);
  if (sleepers > 0) changed.notify_all();
  if (awaited_by_leader == &request) wake_leader();
  request.done.store(true, std::memory_order_release);
}

}  // namespace dicomm
