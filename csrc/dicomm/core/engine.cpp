#include "core/engine.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cmath>

#include "core/clock.h"
#include "core/host.h"
#include "core/text.h"
#include "transport/registry.h"

namespace dicomm {

namespace {

// Tags with the top bit set are the collectives'; their numbers would tell nobody anything.
std::string describe_tag(std::uint64_t tag) {
  return tag >> 63 ? ", of a collective" : text(", tag ", tag);
}

// How long close() tries to hand over what was already counted as sent.
constexpr std::chrono::seconds kLinger{2};
// How long a destroyed send waits for its receiver to let go of the buffer.
constexpr std::chrono::seconds kCancelTimeout{5};

}  // namespace

namespace {

Options with_environment(Options options) {
  options.transport = asked_transport(options);
  return options;
}

}  // namespace

Engine::Engine(std::shared_ptr<Store> store, const Options& options)
    : store_(std::move(store)),
      options_(with_environment(options)),
      pid_(::getpid()),
      me_{options.rank,       options.world_size, options.name,
          options.rank_label, host_name(),        options.secret},
      cores_(usable_cores()),
      peers_(options.world_size),
      lobby_(me_, [this](PendingConnection& pending) { validate(pending); }),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) throw Error(text("no file descriptors left: ", system_error(errno)));
  ledger_.wake_leader = [this] { kick(); };
}

std::shared_ptr<Engine> Engine::create(std::shared_ptr<Store> store, const Options& options) {
  return {new Engine(std::move(store), options), [](Engine* engine) {
            if (engine->is_here()) delete engine;
          }};
}

void Engine::require_here() const {
  if (is_here()) return;
  throw Error(text("this communicator belongs to process ", pid_, ", and this is process ",
                   ::getpid(), ", forked from it, which has none of its connections: let process ",
                   pid_, " communicate, or make a communicator for this process"));
}

Engine::Peer& Engine::checked_peer(int peer, const char* operation) {
  if (peer < 0 || peer >= me_.world_size || peer == me_.rank)
    throw Error(text(operation, ": peer ", peer, " is not another rank of this job (this is rank ",
                     me_.rank, " of ", me_.world_size, ")"));
  return peers_[peer];
}

std::string Engine::describe(int peer) const {
  if (peer == Communicator::any_source) return "any rank";
  const auto& connection = peers_[peer].connection;
  return connection ? connection->peer().describe() : text("rank ", peer);
}

std::string Engine::describe(const RequestState& request) const {
  return request.is_send ? text("send of ", request.bytes, " bytes to ",
                                describe(request.peer_number), describe_tag(request.tag))
                         : text("recv of up to ", request.bytes, " bytes from ",
                                describe(request.peer_number), describe_tag(request.tag));
}

std::int64_t Engine::pace(Peer& peer, std::size_t bytes, std::int64_t ready_at_ns) {
  if (peer.pace.bytes_per_s <= 0) return 0;
  const std::int64_t ready = ready_at_ns > 0 ? ready_at_ns : now_ns();
  const std::int64_t departure = std::max(ready, peer.link_free_at_ns);
  peer.link_free_at_ns = departure + std::llround(bytes / peer.pace.bytes_per_s * 1e9);
  return peer.link_free_at_ns + std::llround(peer.pace.latency_s * 1e9);
}

Engine::Lock Engine::lock() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    ++wanting_lock_;
    lock.lock();
    --wanting_lock_;
  }
  return lock;
}

std::shared_ptr<Request> Engine::isend(const void* data, std::size_t bytes, int peer,
                                       std::uint64_t tag, std::int64_t ready_at_ns) {
  checked_peer(peer, "send");
  auto request = std::make_shared<RequestState>(shared_from_this(), true, const_cast<void*>(data),
                                                bytes, peer, tag);
  const Lock held = lock();
  start_send(*request, ready_at_ns);
  if (!request->done) request->posted_at_ns = rough_now_ns();
  return request;
}

void Engine::send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                  Communicator::Timeout timeout) {
  checked_peer(peer, "send");
  RequestState request(unowned(), true, const_cast<void*>(data), bytes, peer, tag);
  {
    const Lock held = lock();
    start_send(request, 0);
  }
  request.wait(timeout);
}

std::shared_ptr<Request> Engine::irecv(void* data, std::size_t capacity, int peer,
                                       std::uint64_t tag) {
  if (peer != Communicator::any_source) checked_peer(peer, "recv");
  auto request =
      std::make_shared<RequestState>(shared_from_this(), false, data, capacity, peer, tag);
  const Lock held = lock();
  start_receive(*request);
  if (!request->done) request->posted_at_ns = rough_now_ns();
  return request;
}

std::size_t Engine::recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                         Communicator::Timeout timeout) {
  if (peer != Communicator::any_source) checked_peer(peer, "recv");
  RequestState request(unowned(), false, data, capacity, peer, tag);
  {
    const Lock held = lock();
    start_receive(request);
    look_out(request);
  }
  return request.wait(timeout);
}

void Engine::start_send(RequestState& request, std::int64_t ready_at_ns) {
  Peer& to = peers_[request.peer_number];
  touched_ = true;
  ledger_.add(request);
  if (refuse(request)) return;
  to.bytes_sent += request.bytes;
  request.delivered_at = pace(to, request.bytes, ready_at_ns);
  if (Connection* connection = to.live()) {
    connection->send_message(request);
    settle(*connection);
  } else {
    to.backlog.push_back(&request);
    need_connection(request.peer_number);
  }
}

void Engine::start_receive(RequestState& request) {
  touched_ = true;
  ledger_.add(request);
  if (!failure_)  // what a peer sent before it left still counts
    if (const auto arrival = matcher_.match(request)) {
      Connection& connection = *peers_[arrival->peer].connection;
      connection.receive_arrival(request, arrival);
      if (!connection.ended()) {
        settle(connection);
        if (connection.has_pulls()) kick();
      }
      return;
    }
  if (refuse(request)) return;
  matcher_.post(request);
  // Connected even while nothing is to be sent, so that the peer's death is noticed.
  if (request.peer_number != Communicator::any_source) need_connection(request.peer_number);
}

// Whether the request can never succeed; fails it.
bool Engine::refuse(RequestState& request) {
  if (closing_) {
    fail_request(request, Outcome::aborted, "this communicator is closed");
  } else if (failure_) {
    fail_request(request, failure_->outcome, failure_->reason);
  } else if (request.peer_number != Communicator::any_source &&
             !peers_[request.peer_number].gone.empty()) {
    fail_request(request, Outcome::peer_error, peers_[request.peer_number].gone);
  } else {
    return false;
  }
  return true;
}

void Engine::fail_request(RequestState& request, Outcome outcome, const std::string& reason) {
  ledger_.fail(request, outcome,
               text(describe(request), ", failed after ", seconds(request.age()), ": ", reason));
}

void Engine::fail_all(Outcome outcome, const std::string& reason,
                      const std::string& told_to_peers) {
  if (failure_) return;
  failure_ = Failure{outcome, reason, told_to_peers};
  for (const int rank : std::vector<int>(live_)) {
    Connection& connection = *peers_[rank].connection;
    connection.send_abort(told_to_peers);  // before the buffers go
    connection.release_all();
    settle(connection);
  }
  matcher_.clear();
  for (Peer& peer : peers_) peer.backlog.clear();
  ledger_.for_each([&](RequestState& request) { fail_request(request, outcome, reason); });
  kick();
}

void Engine::peer_left(int rank) {
  Peer& peer = peers_[rank];
  peer.gone = describe(rank) + " left (closed its communicator)";
  peer.backlog.clear();
  peer.connection->end();
  std::erase(live_, rank);
  if (failure_) return;  // which fails every request, and says why
  const bool all_gone = std::all_of(peers_.begin(), peers_.end(), [&](const Peer& other) {
    return &other == &peers_[me_.rank] || !other.gone.empty();
  });
  ledger_.for_each([&](RequestState& request) {
    const bool any = request.peer_number == Communicator::any_source;
    if (request.peer_number != rank && !(any && all_gone)) return;
    matcher_.remove(request);
    fail_request(request, Outcome::peer_error, any ? "every peer left" : peer.gone);
  });
}

void Engine::stream_ended(int rank, const StreamEnd& end) {
  const std::string died = end.peer_died
                               ? text(describe(rank), " died (", end.reason, " without a goodbye)")
                               : text(describe(rank), " was lost (", end.reason, ")");
  peers_[rank].connection->end();
  std::erase(live_, rank);
  peers_[rank].gone = died;
  if (!closing_) fail_all(Outcome::peer_error, died, died);
}

void Engine::set_link(int peer, const LinkPace& pace) {
  Peer& to = checked_peer(peer, "set_link");
  if (!(pace.latency_s >= 0) || !(pace.bytes_per_s >= 0))
    throw Error("set_link: latency and bandwidth must not be negative");
  Lock lock(mutex_);
  to.pace = pace;
}

LinkPace Engine::link(int peer) {
  Peer& to = checked_peer(peer, "link");
  Lock lock(mutex_);
  return to.pace;
}

std::uint64_t Engine::bytes_sent(int peer) {
  Peer& to = checked_peer(peer, "bytes_sent");
  Lock lock(mutex_);
  return to.bytes_sent;
}

LinkDescription Engine::describe_link(int peer) {
  Peer& to = checked_peer(peer, "describe_link");
  Lock lock(mutex_);
  Connection* connection = to.live();
  return connection ? connection->stream().describe() : LinkDescription{};
}

void Engine::declare_memory(const MemoryRegion& region) {
  Lock lock(mutex_);
  for (const auto& transport : transports_) transport->declare_memory(region);
}

void Engine::forget_memory(std::uint64_t address, std::uint64_t bytes) {
  Lock lock(mutex_);
  for (const auto& transport : transports_) transport->forget_memory(address, bytes);
}

bool Engine::reaches_declared_memory() const {
  return std::all_of(transports_.begin(), transports_.end(),
                     [](const auto& transport) { return transport->reaches_declared_memory(); });
}

std::string Engine::failure() {
  Lock lock(mutex_);
  return failure_ ? failure_->reason : "";
}

void Engine::relay(const std::string& cause) {
  Lock lock(mutex_);
  if (!closing_) fail_all(Outcome::peer_error, cause, cause);
}

void Engine::abort(const std::string& reason) {
  Lock lock(mutex_);
  if (closing_) return;
  const PeerIdentity me{me_.rank, static_cast<int>(::getpid()), me_.label, me_.host};
  fail_all(Outcome::aborted, "this rank aborted: " + reason,
           text(me.describe(), " aborted: ", reason));
}

// Waits until nobody else reads or writes the buffer.
void Engine::cancel(RequestState& request) {
  if (!is_here()) return;
  Lock lock(mutex_);
  if (request.done) return;
  Connection* connection = request.peer_number == Communicator::any_source
                               ? nullptr
                               : peers_[request.peer_number].live();
  if (!request.is_send) matcher_.remove(request);
  if (request.is_send && request.peer_number != Communicator::any_source)
    std::erase(peers_[request.peer_number].backlog, &request);
  if (connection && !connection->release(request)) {
    settle(*connection);
    const Time deadline = Clock::now() + kCancelTimeout;
    block(lock, request, deadline);
    if (!request.done)
      stream_ended(request.peer_number,
                   {"it did not let go of a cancelled message and was cut off"});
  } else if (connection) {
    settle(*connection);
  }
  if (!request.done) ledger_.finish(request, 0);
}

void Engine::close() {
  {
    Lock lock(mutex_);
    if (closed_) return;
    closed_ = closing_ = true;
    for (const int rank : std::vector<int>(live_)) {
      peers_[rank].connection->release_all();  // before the buffers go
      peers_[rank].connection->send_leave();
    }
    matcher_.clear();
    for (Peer& peer : peers_) peer.backlog.clear();
    ledger_.for_each([&](RequestState& request) {
      fail_request(request, Outcome::aborted, "this communicator was closed");
    });
    linger(lock);
    stop_ = true;
    progress_wanted_.notify_all();
    kick();
    // A caller that leads finds its request done, and leaves.
    ++ledger_.sleepers;
    ledger_.changed.wait(lock, [this] { return !leading_; });
    --ledger_.sleepers;
  }
  if (progress_thread_.joinable()) progress_thread_.join();
  for (std::thread& dialler : diallers_) dialler.join();
  Lock lock(mutex_);
  for (Peer& peer : peers_) {
    if (peer.live()) peer.connection->end();
    peer.crossed = Fd();
  }
  live_.clear();
  lobby_.close();
  listeners_.clear();
  epoll_ = Fd();
}

// Hands over what is queued. A peer hangs up once it read our goodbye; hanging up first, with
// its bytes unread, could destroy ours on the way.
void Engine::linger(Lock& lock) {
  const Time deadline = Clock::now() + kLinger;
  std::vector<int> finished;
  while (Clock::now() < deadline) {
    bool waiting = false;
    for (const int rank : std::vector<int>(live_)) {
      Connection& connection = *peers_[rank].connection;
      settle(connection);
      if (connection.ended()) continue;
      if (connection.has_output()) {
        waiting = true;
      } else if (!connection.stream().outlives_writer()) {
        waiting = true;
        if (std::find(finished.begin(), finished.end(), rank) == finished.end()) {
          connection.stream().finish_writing();
          finished.push_back(rank);
        }
      }
    }
    if (!waiting) return;
    if (leading_) {
      kick();
      ++ledger_.sleepers;
      ledger_.changed.wait_until(lock, deadline);
      --ledger_.sleepers;
    } else {
      drive_progress(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(20)));
    }
  }
}

}  // namespace dicomm
