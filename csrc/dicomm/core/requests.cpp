#include "core/requests.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "core/clock.h"
#include "core/engine.h"
#include "core/text.h"

namespace dicomm {

namespace {

// Tags with the top bit set are the collectives'; their numbers would tell nobody anything.
std::string describe_tag(std::uint64_t tag) {
  return tag >> 63 ? ", of a collective" : text(", tag ", tag);
}

// How long a destroyed send waits for its receiver to let go of the buffer.
constexpr std::chrono::seconds kCancelTimeout{5};

// For a request that ends before its communicator does.
std::shared_ptr<Engine> unowned(Engine& engine) { return {std::shared_ptr<void>(), &engine}; }

}  // namespace

Requests::Requests(Engine& engine, const Options& options, const Identity& me, Guard& guard,
                   Poller& poller, ConnectionManager& connections, ProgressDriver& progress)
    : engine_(engine),
      options_(options),
      me_(me),
      guard_(guard),
      poller_(poller),
      connections_(connections),
      progress_(progress),
      outgoing_(me.world_size),
      chip_queue_(
          [this](RequestState& request) {
            request.is_send ? hand_over(request, 0) : post(request);
          },
          [this](RequestState& request, const char* what) {
            fail(request, Outcome::error, text("this rank's chip failed: ", what));
          }) {}

Requests::Outgoing& Requests::checked_peer(int peer, const char* operation) {
  if (peer < 0 || peer >= me_.world_size || peer == me_.rank)
    throw Error(text(operation, ": peer ", peer, " is not another rank of this job (this is rank ",
                     me_.rank, " of ", me_.world_size, ")"));
  return outgoing_[peer];
}

std::string Requests::describe(const RequestState& request) const {
  return request.is_send
             ? text("send of ", request.bytes, " bytes to ",
                    connections_.describe(request.peer_number), describe_tag(request.tag))
             : text("recv of up to ", request.bytes, " bytes from ",
                    connections_.describe(request.peer_number), describe_tag(request.tag));
}

std::int64_t Requests::pace(Outgoing& peer, std::size_t bytes, std::int64_t ready_at_ns) {
  if (peer.pace.bytes_per_s <= 0) return 0;
  const std::int64_t ready = ready_at_ns > 0 ? ready_at_ns : now_ns();
  const std::int64_t departure = std::max(ready, peer.link_free_at_ns);
  peer.link_free_at_ns = departure + std::llround(bytes / peer.pace.bytes_per_s * 1e9);
  return peer.link_free_at_ns + std::llround(peer.pace.latency_s * 1e9);
}

std::shared_ptr<Request> Requests::isend(const void* data, std::size_t bytes, int peer,
                                         std::uint64_t tag, std::int64_t ready_at_ns,
                                         std::shared_ptr<ChipBuffer> chip,
                                         std::shared_ptr<ChipWork> after) {
  checked_peer(peer, "send");
  auto request = std::make_shared<RequestState>(engine_.shared_from_this(), true,
                                                const_cast<void*>(data), bytes, peer, tag);
  request->chip = std::move(chip);
  request->after = std::move(after);
  const Lock held = guard_.lock();
  start_send(*request, ready_at_ns);
  if (!request->done) request->posted_at_ns = rough_now_ns();
  return request;
}

void Requests::start(RequestState& request, std::int64_t ready_at_ns) {
  const int peer = request.peer_number;
  if (peer != Communicator::any_source) checked_peer(peer, request.is_send ? "send" : "recv");
  request.engine = unowned(engine_);
  const Lock held = guard_.lock();
  if (request.is_send)
    start_send(request, ready_at_ns);
  else
    start_receive(request);
}

void Requests::send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                    Communicator::Timeout timeout) {
  RequestState request(nullptr, true, const_cast<void*>(data), bytes, peer, tag);
  start(request, 0);
  request.wait(timeout);
}

std::shared_ptr<Request> Requests::irecv(void* data, std::size_t capacity, int peer,
                                         std::uint64_t tag, std::shared_ptr<ChipBuffer> chip,
                                         std::shared_ptr<ChipWork> after) {
  if (peer != Communicator::any_source) checked_peer(peer, "recv");
  auto request =
      std::make_shared<RequestState>(engine_.shared_from_this(), false, data, capacity, peer, tag);
  request->chip = std::move(chip);
  request->after = std::move(after);
  const Lock held = guard_.lock();
  start_receive(*request);
  if (!request->done) request->posted_at_ns = rough_now_ns();
  return request;
}

std::size_t Requests::recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                           Communicator::Timeout timeout) {
  if (peer != Communicator::any_source) checked_peer(peer, "recv");
  RequestState request(unowned(engine_), false, data, capacity, peer, tag);
  {
    const Lock held = guard_.lock();
    start_receive(request);
    progress_.look_out(request);
  }
  return request.wait(timeout);
}

void Requests::start_send(RequestState& request, std::int64_t ready_at_ns) {
  progress_.touch();
  ledger_.add(request);
  if (refuse(request)) return;
  outgoing_[request.peer_number].bytes_sent += request.bytes;
  if (!waits_for_chip(request)) hand_over(request, ready_at_ns);
}

bool Requests::waits_for_chip(RequestState& request) {
  if (!chip_queue_.holds_back(request)) {
    request.after.reset();  // the chip is through
    return false;
  }
  chip_queue_.push(request);
  progress_.look_at_chip();
  if (request.peer_number != Communicator::any_source)
    connections_.need(request.peer_number);  // meanwhile; and so that its death is noticed
  return true;
}

// Its bytes are there.
void Requests::hand_over(RequestState& request, std::int64_t ready_at_ns) {
  Outgoing& to = outgoing_[request.peer_number];
  request.delivered_at = pace(to, request.bytes, ready_at_ns);
  if (Connection* connection = connections_.live(request.peer_number)) {
    connection->send_message(request);
    connections_.settle(*connection);
  } else {
    to.backlog.push_back(&request);
    connections_.need(request.peer_number);
  }
}

void Requests::start_receive(RequestState& request) {
  progress_.touch();
  ledger_.add(request);
  if (failure_ || !waits_for_chip(request)) post(request);
}

// Its buffer may be written to.
void Requests::post(RequestState& request) {
  if (!failure_)  // what a peer sent before it left still counts
    if (const auto arrival = matcher_.match(request)) {
      Connection& connection = *connections_.connection(arrival->peer);
      connection.receive_arrival(request, arrival);
      if (!connection.ended()) {
        connections_.settle(connection);
        if (connection.has_pulls() || connection.chip_copies_since()) poller_.wake();
      }
      return;
    }
  if (refuse(request)) return;
  matcher_.post(request);
  // Connected even while nothing is to be sent, so that the peer's death is noticed.
  if (request.peer_number != Communicator::any_source) connections_.need(request.peer_number);
}

// Whether the request can never succeed; fails it.
bool Requests::refuse(RequestState& request) {
  const int rank = request.peer_number;
  if (closing_) {
    fail(request, Outcome::aborted, "this communicator is closed");
  } else if (failure_) {
    fail(request, failure_->outcome, failure_->reason);
  } else if (rank != Communicator::any_source && !connections_.gone(rank).empty()) {
    fail(request, Outcome::peer_error, connections_.gone(rank));
  } else if (rank == Communicator::any_source && connections_.all_gone()) {
    fail(request, Outcome::peer_error, "every peer left");
  } else {
    return false;
  }
  return true;
}

void Requests::fail(RequestState& request, Outcome outcome, const std::string& reason) {
  ledger_.fail(request, outcome,
               text(describe(request), ", failed after ", seconds(request.age()), ": ", reason));
}

// What neither a connection nor a message has taken yet.
void Requests::forget_queued() {
  matcher_.clear();
  chip_queue_.clear();
  for (Outgoing& peer : outgoing_) peer.backlog.clear();
}

void Requests::fail_all(Outcome outcome, const std::string& reason,
                        const std::string& told_to_peers) {
  if (failure_) return;
  failure_ = Failure{outcome, reason};
  connections_.abort_all(told_to_peers);
  forget_queued();
  ledger_.for_each([&](RequestState& request) { fail(request, outcome, reason); });
  poller_.wake();
}

void Requests::peer_connected(int rank, Connection& connection) {
  auto& backlog = outgoing_[rank].backlog;
  for (RequestState* request : backlog) connection.send_message(*request);
  backlog.clear();
}

void Requests::peer_left(int rank) {
  outgoing_[rank].backlog.clear();
  if (failure_) return;  // which fails every request, and says why
  const bool all_gone = connections_.all_gone();
  ledger_.for_each([&](RequestState& request) {
    const bool any = request.peer_number == Communicator::any_source;
    if (request.peer_number != rank && !(any && all_gone)) return;
    if (!request.is_send && chip_queue_.contains(request)) return;  // the message may be here
    matcher_.remove(request);
    chip_queue_.remove(request);
    fail(request, Outcome::peer_error, any ? "every peer left" : connections_.gone(rank));
  });
}

void Requests::peer_failed(const std::string& reason) {
  if (!closing_) fail_all(Outcome::peer_error, reason, reason);
}

void Requests::set_link(int peer, const LinkPace& pace) {
  Outgoing& to = checked_peer(peer, "set_link");
  if (!(pace.latency_s >= 0) || !(pace.bytes_per_s >= 0))
    throw Error("set_link: latency and bandwidth must not be negative");
  Lock lock(guard_.mutex);
  to.pace = pace;
  paced_ = true;
}

LinkPace Requests::link(int peer) {
  Outgoing& to = checked_peer(peer, "link");
  if (!paced_) return {};  // collectives ask before each message
  Lock lock(guard_.mutex);
  return to.pace;
}

std::uint64_t Requests::bytes_sent(int peer) {
  Outgoing& to = checked_peer(peer, "bytes_sent");
  Lock lock(guard_.mutex);
  return to.bytes_sent;
}

LinkDescription Requests::describe_link(int peer) {
  checked_peer(peer, "describe_link");
  Lock lock(guard_.mutex);
  const Connection* connection = connections_.live(peer);
  return connection ? connection->stream().describe() : LinkDescription{};
}

std::string Requests::failure() {
  Lock lock(guard_.mutex);
  return failure_ ? failure_->reason : "";
}

void Requests::relay(const std::string& cause) {
  Lock lock(guard_.mutex);
  if (!closing_) fail_all(Outcome::peer_error, cause, cause);
}

void Requests::abort(const std::string& reason) {
  Lock lock(guard_.mutex);
  if (closing_) return;
  const PeerIdentity me{me_.rank, static_cast<int>(::getpid()), me_.label, me_.host};
  fail_all(Outcome::aborted, "this rank aborted: " + reason,
           text(me.describe(), " aborted: ", reason));
}

void Requests::wait(RequestState& request, Communicator::Timeout timeout) {
  if (progress_.wait(request, timeout.value_or(options_.timeout))) return;
  Lock lock(guard_.mutex);
  if (request.done) return;
  throw TimeoutError(text(describe(request), ": not done after ", seconds(request.age()),
                          chip_queue_.contains(request) ? "; this rank's chip has yet to get there"
                                                        : connections_.hint(request.peer_number)));
}

void Requests::cancel(RequestState& request) {
  Lock lock(guard_.mutex);
  if (request.done) return;
  const int rank = request.peer_number;
  Connection* connection = rank == Communicator::any_source ? nullptr : connections_.live(rank);
  if (!request.is_send) matcher_.remove(request);
  if (request.is_send) std::erase(outgoing_[rank].backlog, &request);
  chip_queue_.remove(request);
  if (connection && !connection->release(request)) {
    connections_.settle(*connection);
    progress_.block(lock, request, Clock::now() + kCancelTimeout);
    if (!request.done)
      connections_.cut_off(rank, "it did not let go of a cancelled message and was cut off");
  } else if (connection) {
    connections_.settle(*connection);
  }
  if (!request.done) ledger_.finish(request, 0);
}

void Requests::close() {
  closing_ = true;
  forget_queued();
  ledger_.for_each([&](RequestState& request) {
    fail(request, Outcome::aborted, "this communicator was closed");
  });
}

}  // namespace dicomm
