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

// How long a peer may hold a buffer that nobody here waits for any more, of a request that was
// destroyed or has failed.
constexpr std::chrono::seconds kReleaseTimeout{5};

// For a request that ends before its communicator does.
std::shared_ptr<Requests> unowned(Requests& requests) {
  return {std::shared_ptr<void>(), &requests};
}

}  // namespace

Requests::Requests(std::shared_ptr<Engine> engine, const Options& options, std::uint32_t context,
                   const std::vector<int>& ranks)
    : engine_(std::move(engine)),
      options_(options),
      context_(context),
      peers_(ranks.size()),
      rank_of_(engine_->me().world_size, -1) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    peers_[rank].world_rank = ranks[rank];
    rank_of_[ranks[rank]] = static_cast<int>(rank);
  }
}

std::shared_ptr<Requests> Requests::create(std::shared_ptr<Engine> engine, const Options& options,
                                           std::uint32_t context, const std::vector<int>& ranks) {
  std::shared_ptr<Requests> requests(new Requests(std::move(engine), options, context, ranks),
                                     [](Requests* old) {
                                       if (old->engine_->is_here()) delete old;
                                     });
  const Lock held = requests->engine_->guard().lock();
  requests->engine_->open(*requests);
  return requests;
}

void Requests::throw_no_such_peer(int peer, const char* operation) const {
  throw Error(text(operation, ": peer ", peer, " is not another rank of this job (this is rank ",
                   options_.rank, " of ", options_.world_size, ")"));
}

const std::string& Requests::gone(const Peer& peer) const {
  return peer.gone.empty() ? engine_->connections().gone(peer.world_rank) : peer.gone;
}

bool Requests::all_gone() const {
  return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    return &peer == &peers_[options_.rank] || !gone(peer).empty();
  });
}

std::string Requests::describe(const RequestState& request) const {
  const std::string peer = engine_->connections().describe(request.peer_number);
  return request.is_send
             ? text("send of ", request.bytes, " bytes to ", peer, describe_tag(request.tag))
             : text("recv of up to ", request.bytes, " bytes from ", peer,
                    describe_tag(request.tag));
}

std::int64_t Requests::pace(Peer& peer, std::size_t bytes, std::int64_t ready_at_ns) {
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
  const int to = checked_peer(peer, "send");
  auto request = std::make_shared<RequestState>(shared_from_this(), true, const_cast<void*>(data),
                                                bytes, to, tag);
  request->chip = std::move(chip);
  request->after = std::move(after);
  const Lock held = engine_->guard().lock();
  start_send(*request, ready_at_ns);
  if (!request->done) request->posted_at_ns = rough_now_ns();
  return request;
}

void Requests::start(RequestState& request, std::int64_t ready_at_ns) {
  if (request.peer_number != Communicator::any_source)
    request.peer_number = checked_peer(request.peer_number, request.is_send ? "send" : "recv");
  request.owner = unowned(*this);
  const Lock held = engine_->guard().lock();
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
  const int from = peer == Communicator::any_source ? peer : checked_peer(peer, "recv");
  auto request =
      std::make_shared<RequestState>(shared_from_this(), false, data, capacity, from, tag);
  request->chip = std::move(chip);
  request->after = std::move(after);
  const Lock held = engine_->guard().lock();
  start_receive(*request);
  if (!request->done) request->posted_at_ns = rough_now_ns();
  return request;
}

std::size_t Requests::recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                           Communicator::Timeout timeout) {
  const int from = peer == Communicator::any_source ? peer : checked_peer(peer, "recv");
  RequestState request(unowned(*this), false, data, capacity, from, tag);
  {
    const Lock held = engine_->guard().lock();
    start_receive(request);
    engine_->progress().look_out(request);
  }
  return request.wait(timeout);
}

void Requests::add(RequestState& request) {
  engine_->progress().touch();
  engine_->ledger().add(request);
}

// Most short messages: nothing holds them up, and there is room for them. Such a request is never
// among those that wait.
bool Requests::send_at_once(RequestState& request) {
  Peer& to = peer_of(request);
  if (failure_ || closing_ || !to.told || !to.gone.empty() || to.pace.bytes_per_s > 0) return false;
  if (request.chip || engine_->chip_queue().holds_back(request)) return false;
  Connection* connection = engine_->connections().live(to.world_rank);
  if (!connection || !connection->send_at_once(request)) return false;
  engine_->connections().rouse(*connection);
  engine_->progress().touch();
  to.bytes_sent += request.bytes;
  request.after.reset();  // the chip is through
  request.moved = request.bytes;
  request.done.store(true, std::memory_order_release);
  return true;
}

void Requests::start_send(RequestState& request, std::int64_t ready_at_ns) {
  request.context = context_;
  if (send_at_once(request)) return;
  add(request);
  if (refuse(request)) return;
  peer_of(request).bytes_sent += request.bytes;
  if (!waits_for_chip(request)) hand_over(request, ready_at_ns);
}

bool Requests::waits_for_chip(RequestState& request) {
  ChipQueue& queue = engine_->chip_queue();
  if (!queue.holds_back(request)) {
    request.after.reset();  // the chip is through
    return false;
  }
  queue.push(request);
  engine_->progress().look_at_chip();
  if (request.peer_number != Communicator::any_source)
    reach(peer_of(request));  // meanwhile; and so that its death is noticed
  return true;
}

void Requests::chip_is_through(RequestState& request) {
  request.is_send ? hand_over(request, 0) : post(request);
}

void Requests::chip_failed(RequestState& request, const char* what) {
  fail(request, Outcome::error, text("this rank's chip failed: ", what));
}

// Its bytes are there.
void Requests::hand_over(RequestState& request, std::int64_t ready_at_ns) {
  Peer& to = peer_of(request);
  request.delivered_at = pace(to, request.bytes, ready_at_ns);
  Connection* connection = reach(to);
  if (request.done) return;  // the peer's end showed as it was reached
  if (connection) {
    connection->send_message(request);
    engine_->connections().settle(*connection);
  } else {
    to.backlog.push_back(&request);
  }
}

// Its connection, which is made where there is none: null until then.
Connection* Requests::reach(Peer& peer) {
  ConnectionManager& connections = engine_->connections();
  if (!peer.told) {
    peer.wanted = true;
    connections.need(peer.world_rank);
    if (Connection* connection = connections.live(peer.world_rank)) {
      join(peer, *connection);
      connections.settle(*connection);
    }
  }
  return connections.live(peer.world_rank);
}

void Requests::join(Peer& peer, Connection& connection) {
  peer.told = true;
  connection.send_join(context_);
}

void Requests::start_receive(RequestState& request) {
  request.context = context_;
  add(request);
  if (failure_ || closing_ || !waits_for_chip(request)) post(request);
}

// Its buffer may be written to.
void Requests::post(RequestState& request) {
  ConnectionManager& connections = engine_->connections();
  if (!failure_)  // what a peer sent before it left still counts
    if (const auto arrival = engine_->matcher().match(request)) {
      Connection& connection = *connections.connection(arrival->peer);
      try {
        connection.receive_arrival(request, arrival);
      } catch (const std::exception& error) {
        if (arrival->offered) connection.turn_down(*arrival);
        let_go(request, Outcome::error, text("this rank could not receive it: ", error.what()));
      }
      if (!connection.ended()) {
        connections.settle(connection);
        if (connection.has_pulls() || connection.copies_by_chip()) engine_->poller().wake();
      }
      return;
    }
  if (refuse(request)) return;
  engine_->matcher().post(request);
  // Connected even while nothing is to be sent, so that the peer's death is noticed.
  if (request.peer_number != Communicator::any_source) reach(peer_of(request));
}

// Whether the request can never succeed; fails it.
bool Requests::refuse(RequestState& request) {
  const bool any = request.peer_number == Communicator::any_source;
  if (!closing_ && !failure_ && !(any ? all_gone() : !gone(peer_of(request)).empty())) return false;
  fail_hopeless(request);
  return true;
}

// Of one that refuse() found to have no hope.
void Requests::fail_hopeless(RequestState& request) {
  if (closing_)
    fail(request, Outcome::aborted, "this communicator is closed");
  else if (failure_)
    fail(request, failure_->outcome, failure_->reason);
  else if (request.peer_number == Communicator::any_source)
    fail(request, Outcome::peer_error, "every peer left");
  else
    fail(request, Outcome::peer_error, gone(peer_of(request)));
}

std::string Requests::failure_of(const RequestState& request, const std::string& reason) const {
  return text(describe(request), ", failed after ", seconds(request.age()), ": ", reason);
}

void Requests::fail(RequestState& request, Outcome outcome, const std::string& reason) {
  engine_->ledger().fail(request, outcome, failure_of(request, reason));
}

// The same for one that is under way: where its peer may still read or write the buffer, it ends
// once the peer has let go of it.
void Requests::let_go(RequestState& request, Outcome outcome, const std::string& reason) {
  if (request.outcome != Outcome::success) return;  // it was let go, and why counts
  Connection* connection = request.peer_number == Communicator::any_source
                               ? nullptr
                               : engine_->connections().live(request.peer_number);
  if (!connection || connection->release(request)) return fail(request, outcome, reason);
  Ledger::doom(request, outcome, failure_of(request, reason));
  request.release_by = failure_ ? Clock::now() + kReleaseTimeout : deadline_after(options_.timeout);
}

template <class F>
void Requests::for_each_request(F&& visit) {
  engine_->ledger().for_each([&](RequestState& request) {
    if (request.context == context_) visit(request);
  });
}

// The connections with peers that count on this side.
template <class F>
void Requests::for_each_joined(F&& visit) {
  for (const Peer& peer : peers_)
    if (Connection* connection = engine_->connections().live(peer.world_rank);
        connection && connection->is_joined(context_))
      visit(*connection);
}

// What neither a connection nor a message has taken yet, and messages that nobody will want.
void Requests::forget_queued() {
  for (const auto& arrival : engine_->matcher().end(context_))
    if (Connection* connection = engine_->connections().live(arrival->peer))
      connection->turn_down(*arrival);
  engine_->chip_queue().remove_all(context_);
  for (Peer& peer : peers_) peer.backlog.clear();
}

// After what was said to the peers before they hear what becomes of messages.
void Requests::let_all_go(Outcome outcome, const std::string& reason) {
  forget_queued();
  for_each_request([&](RequestState& request) { let_go(request, outcome, reason); });
  for (const Peer& peer : peers_)
    if (Connection* connection = engine_->connections().live(peer.world_rank))
      engine_->connections().settle(*connection);
  engine_->poller().wake();
}

void Requests::fail_all(Outcome outcome, const std::string& reason,
                        const std::string& told_to_peers) {
  if (failure_) return;
  failure_ = Failure{outcome, reason, told_to_peers};
  for_each_joined([&](Connection& connection) { connection.send_abort(context_, told_to_peers); });
  let_all_go(outcome, reason);
}

void Requests::peer_connected(int world_rank, Connection& connection) {
  const int rank = rank_of(world_rank);
  if (rank < 0 || !peers_[rank].wanted) return;
  Peer& peer = peers_[rank];
  join(peer, connection);
  for (RequestState* request : peer.backlog) connection.send_message(*request);
  peer.backlog.clear();
}

// It is told from now on how this communicator ends.
void Requests::peer_joined(int world_rank) {
  const int rank = rank_of(world_rank);
  Connection* connection = engine_->connections().live(world_rank);
  if (rank < 0 || !connection) return;
  if (failure_)
    connection->send_abort(context_, failure_->told_to_peers);
  else if (!peers_[rank].told)
    join(peers_[rank], *connection);
  engine_->connections().settle(*connection);
}

void Requests::peer_left(int world_rank, const std::string& how) {
  const int rank = rank_of(world_rank);
  if (rank < 0) return;
  if (peers_[rank].gone.empty()) peers_[rank].gone = how;
  peers_[rank].backlog.clear();
  if (failure_) return;  // which fails every request, and says why
  const bool every = all_gone();
  for_each_request([&](RequestState& request) {
    const bool any = request.peer_number == Communicator::any_source;
    if (request.peer_number != world_rank && !(any && every)) return;
    if (!request.is_send && engine_->chip_queue().contains(request)) return;  // it may be here
    engine_->matcher().remove(request);
    engine_->chip_queue().remove(request);
    let_go(request, Outcome::peer_error, any ? "every peer left" : peers_[rank].gone);
  });
  if (Connection* connection = engine_->connections().live(world_rank))
    engine_->connections().settle(*connection);
}

void Requests::peer_failed(const std::string& reason) {
  if (!closing_) fail_all(Outcome::peer_error, reason, reason);
}

void Requests::set_link(int peer, const LinkPace& pace) {
  checked_peer(peer, "set_link");
  if (!(pace.latency_s >= 0) || !(pace.bytes_per_s >= 0))
    throw Error("set_link: latency and bandwidth must not be negative");
  Lock lock(engine_->guard().mutex);
  peers_[peer].pace = pace;
  paced_ = true;
}

LinkPace Requests::link(int peer) {
  checked_peer(peer, "link");
  if (!paced_) return {};  // collectives ask before each message
  Lock lock(engine_->guard().mutex);
  return peers_[peer].pace;
}

std::uint64_t Requests::bytes_sent(int peer) {
  checked_peer(peer, "bytes_sent");
  Lock lock(engine_->guard().mutex);
  return peers_[peer].bytes_sent;
}

LinkDescription Requests::describe_link(int peer) {
  const int to = checked_peer(peer, "describe_link");
  Lock lock(engine_->guard().mutex);
  const Connection* connection = engine_->connections().live(to);
  return connection ? connection->stream().describe() : LinkDescription{};
}

std::string Requests::failure() {
  Lock lock(engine_->guard().mutex);
  return failure_ ? failure_->reason : "";
}

void Requests::relay(const std::string& cause) {
  Lock lock(engine_->guard().mutex);
  if (!closing_) fail_all(Outcome::peer_error, cause, cause);
}

void Requests::abort(const std::string& reason) {
  Lock lock(engine_->guard().mutex);
  if (closing_) return;
  const Identity& own = engine_->me();
  const PeerIdentity me{own.rank, static_cast<int>(::getpid()), own.label, own.host};
  fail_all(Outcome::aborted, "this rank aborted: " + reason,
           text(me.describe(), " aborted: ", reason));
}

void Requests::wait(RequestState& request, Communicator::Timeout timeout) {
  if (engine_->progress().wait(request, timeout.value_or(options_.timeout))) return;
  Lock lock(engine_->guard().mutex);
  if (request.done) return;
  if (request.outcome != Outcome::success)
    throw TimeoutError(request.failure + "; its peer has yet to let go of the buffer");
  throw TimeoutError(
      text(describe(request), ": not done after ", seconds(request.age()), hint(request)));
}

// What may explain that a wait was in vain.
std::string Requests::hint(const RequestState& request) const {
  if (engine_->chip_queue().contains(request)) return "; this rank's chip has yet to get there";
  const int rank = request.peer_number;
  const ConnectionManager& connections = engine_->connections();
  const bool any = rank == Communicator::any_source;
  if (const Connection* connection = any ? nullptr : connections.live(rank);
      connection && !connection->is_joined(context_))
    return text("; it has not used group '", options_.name, "' yet", connections.hint(rank));
  return connections.hint(rank);
}

void Requests::cancel(RequestState& request) {
  Lock lock(engine_->guard().mutex);
  if (request.done) return;
  const int rank = request.peer_number;
  ConnectionManager& connections = engine_->connections();
  Connection* connection = rank == Communicator::any_source ? nullptr : connections.live(rank);
  if (!request.is_send) engine_->matcher().remove(request);
  if (request.is_send) std::erase(peer_of(request).backlog, &request);
  engine_->chip_queue().remove(request);
  const bool let_go = request.outcome != Outcome::success;  // before: it failed
  if (connection && (let_go || !connection->release(request))) {
    const auto deadline = Clock::now() + kReleaseTimeout;
    if (!let_go) Ledger::doom(request, Outcome::aborted, "");
    request.release_by = let_go ? std::min(request.release_by, deadline) : deadline;
    connections.settle(*connection);
    engine_->progress().block(lock, request, request.release_by);
    if (!request.done) connections.cut_off_holder(rank);
  } else if (connection) {
    connections.settle(*connection);
  }
  if (!request.done) engine_->ledger().finish(request, 0);
}

void Requests::close() {
  closing_ = true;
  for_each_joined([&](Connection& connection) { connection.send_leave(context_); });
  let_all_go(Outcome::aborted, "this communicator was closed");
}

}  // namespace dicomm
