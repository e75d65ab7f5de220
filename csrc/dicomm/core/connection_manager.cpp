#include "core/connection_manager.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/clock.h"
#include "core/text.h"

namespace dicomm {

namespace {

constexpr std::chrono::seconds kCheckEvery{5};  // that peers are alive
constexpr std::size_t kFew = 8;  // connections: to look at all costs less than to be woken
constexpr int kIdleSleeps = 64;  // more than lie between two messages of a peer in steady use

// Why the connection is over, if it is, after some of its bytes were moved. Where this side fails,
// for want of memory, say, bytes are lost: it is over, too.
template <class F>
std::optional<StreamEnd> end_after(F&& move) {
  try {
    move();
  } catch (const StreamEnd& end) {
    return end;
  } catch (const std::exception& error) {
    return StreamEnd{text("this rank failed to take part: ", error.what()), false};
  }
  return std::nullopt;
}

}  // namespace

ConnectionManager::ConnectionManager(std::shared_ptr<Store> store, const Options& options,
                                     const Identity& me, Guard& guard, Poller& poller,
                                     Ledger& ledger, Matcher& matcher, ConnectionEvents& events)
    : store_(std::move(store)),
      options_(options),
      me_(me),
      guard_(guard),
      poller_(poller),
      ledger_(ledger),
      matcher_(matcher),
      events_(events),
      peers_(me.world_size),
      lobby_(me, [this](PendingConnection& pending) { validate(pending); }) {}

void ConnectionManager::connected(int rank, const PeerIdentity& peer,
                                  std::unique_ptr<Stream> stream) {
  Peer& there = peers_[rank];
  there.connection = std::make_unique<Connection>(peer, std::move(stream), ledger_, matcher_);
  Connection& connection = *there.connection;
  live_.push_back(rank);
  awake_.push_back(rank);
  if (peer.host == me_.host) ++same_host_peers_;
  if (crowded())
    for (const int each : live_) peers_[each].connection->stream().become_crowded();
  there.crossed = Fd();
  poller_.watch(connection.stream().fd(), Poller::Source::peer, rank);
  events_.peer_connected(rank, connection);
  settle(connection);
  poller_.wake();
}

std::string ConnectionManager::describe(int rank) const {
  if (rank == Communicator::any_source) return "any rank";
  const Connection* found = connection(rank);
  return found ? found->peer().describe() : text("rank ", rank);
}

std::string ConnectionManager::hint(int rank) const {
  std::string hint;
  if (rank != Communicator::any_source && !live(rank)) {
    hint = text("; rank ", rank, " is not connected yet", addresses(rank));
    const std::string& turned_away = peers_[rank].turned_away;
    if (!turned_away.empty()) hint += "; the last call failed as " + turned_away;
  }
  if (!lobby_.last_refusal.empty())
    hint += text("; a connection was refused: ", lobby_.last_refusal);
  return hint;
}

void ConnectionManager::stop_resting(Connection& connection) {
  connection.resting = false;
  awake_.push_back(connection.peer().rank);
}

void ConnectionManager::settle(Connection& connection) {
  rouse(connection);
  const auto end = end_after([&] {
    const bool blocked = !connection.flush();
    Stream& stream = connection.stream();
    if (stream.watch_writable()) {
      if (blocked != connection.watching_writable) {
        connection.watching_writable = blocked;
        poller_.watch_writable(stream.fd(), connection.peer().rank, blocked);
      }
    } else if (blocked && poller_.sleeping() && !stream.prepare_sleep(true)) {
      poller_.wake();
    }
  });
  if (!end) return;
  // The peer's last words may still be unread.
  end_after([&] {
    while (connection.receive()) {
    }
  });
  conclude(connection, &*end);
}

// What follows from the peer's words so far: why it gave up counts before that it left.
void ConnectionManager::conclude(Connection& connection, const StreamEnd* end) {
  const int rank = connection.peer().rank;
  for (const Connection::Word& word : connection.take_words()) events_.peer_said(rank, word);
  if (connection.ended()) return;
  if (connection.has_left()) {
    end_connection(rank, describe(rank) + " left (closed its communicator)");
    events_.peer_left(rank);
  } else if (end) {
    stream_ended(rank, *end);
  }
}

void ConnectionManager::end_connection(int rank, std::string why) {
  peers_[rank].connection->end();
  std::erase(live_, rank);
  std::erase(awake_, rank);
  peers_[rank].gone = std::move(why);
}

void ConnectionManager::stream_ended(int rank, const StreamEnd& end) {
  end_connection(rank, end.peer_died
                           ? text(describe(rank), " died (", end.reason, " without a goodbye)")
                           : text(describe(rank), " was lost (", end.reason, ")"));
  events_.peer_failed(rank);
}

void ConnectionManager::cut_off_holder(int rank) {
  stream_ended(rank, {"it did not let go of a cancelled message and was cut off", false});
}

void ConnectionManager::cut_off_holders(Time now) {
  std::set<int> holders;
  ledger_.for_each([&](const RequestState& request) {
    if (request.outcome != Outcome::success && request.release_by <= now)
      holders.insert(request.peer_number);
  });
  for (const int rank : holders)
    if (live(rank)) cut_off_holder(rank);
}

// One look at a connection: reads, copies, writes, and draws the conclusions.
void ConnectionManager::turn(Connection& connection) {
  if (connection.idle()) return;
  bool received = false;
  const auto end = end_after([&] {
    received = connection.receive();
    if (connection.copying() && connection.copy(!crowded())) copied_ = true;
  });
  if (received || connection.copying()) rouse(connection);
  if (end || connection.has_words()) conclude(connection, end ? &*end : nullptr);
  if (!connection.ended() && connection.has_output()) settle(connection);
}

void ConnectionManager::turn_all(int awaited_peer) {
  for (std::size_t i = 0; i < awake_.size(); ++i) {
    Connection& connection = *peers_[awake_[i]].connection;
    const bool wanted = awaited_peer == awake_[i] || awaited_peer == Communicator::any_source;
    if (wanted || connection.stream().cheap_to_poll()) turn(connection);
  }
  if (awaited_peer == Communicator::any_source) return;
  if (Connection* awaited = live(awaited_peer); awaited && awaited->resting) turn(*awaited);
}

bool ConnectionManager::ready_to_sleep() {
  bool ready = true;
  for (const int rank : awake_) {
    Connection& connection = *peers_[rank].connection;
    ready &= connection.stream().prepare_sleep(connection.has_output());
    ready &= !connection.has_pulls();
  }
  return ready;
}

void ConnectionManager::woke(bool was_ready) {
  const bool may_rest = was_ready && live_.size() > kFew;
  std::erase_if(awake_, [&](int rank) {
    Connection& connection = *peers_[rank].connection;
    connection.resting = may_rest && connection.idle_sleeps++ >= kIdleSleeps &&
                         !connection.copying() && !connection.has_output();
    if (!connection.resting) connection.stream().woke();
    return connection.resting;
  });
}

void ConnectionManager::handle(const Poller::Event& event) {
  switch (event.source) {
    case Poller::Source::wakeup:
      return;
    case Poller::Source::lobby:
      return serve_lobby();
    case Poller::Source::peer:
      if (Connection* connection = live(event.which)) {
        connection->stream().on_event();
        rouse(*connection);  // its peer wakes this side only once
        turn(*connection);
      }
      return;
  }
}

ConnectionManager::Time ConnectionManager::check_alive() {
  if (live_.empty()) return Time::max();
  const Time now = Clock::now();
  if (now < next_check_) return next_check_;
  next_check_ = now + kCheckEvery;
  for (const int rank : std::vector<int>(live_)) {
    Connection* connection = live(rank);
    if (!connection) continue;
    try {
      connection->stream().check_alive();
    } catch (const StreamEnd& end) {
      conclude(*connection, &end);
    }
  }
  cut_off_holders(now);
  return next_check_;
}

std::optional<ConnectionManager::Time> ConnectionManager::chip_copies_since() const {
  std::optional<Time> since;
  for (const int rank : awake_)
    if (const auto begun = peers_[rank].connection->chip_copies_since())
      since = std::min(since.value_or(*begun), *begun);
  return since;
}

bool ConnectionManager::has_chip_copies(std::uint32_t context) const {
  return std::ranges::any_of(
      awake_, [&](int rank) { return peers_[rank].connection->has_chip_copies(context); });
}

// A caller costs nobody but itself, not even where memory is short.
void ConnectionManager::serve_lobby() {
  try {
    lobby_.serve();
  } catch (const std::exception& error) {
    lobby_.last_refusal = error.what();
  }
}

void ConnectionManager::leave_all() {
  closing_ = true;
  for (const int rank : live_) {
    peers_[rank].connection->release_all();  // before the buffers go
    peers_[rank].connection->send_goodbye();
  }
}

// A peer hangs up once it read our goodbye; hanging up first, with its bytes unread, could destroy
// ours on the way.
bool ConnectionManager::handed_over() {
  bool all = true;
  for (const int rank : std::vector<int>(live_)) {
    Peer& peer = peers_[rank];
    settle(*peer.connection);
    if (peer.connection->ended()) continue;
    if (peer.connection->has_output()) {
      all = false;
    } else if (!peer.connection->stream().outlives_writer()) {
      all = false;
      if (!std::exchange(peer.finished_writing, true)) peer.connection->stream().finish_writing();
    }
  }
  return all;
}

void ConnectionManager::close() {
  Lock lock(guard_.mutex);
  no_dialler_left_.wait(lock, [this] { return diallers_.empty(); });
  for (std::thread& dialler : ended_dialler_) dialler.join();  // it needs the mutex no more
  for (Peer& peer : peers_) {
    if (peer.connection && !peer.connection->ended()) peer.connection->end();
    peer.crossed = Fd();
  }
  live_.clear();
  awake_.clear();
  lobby_.close();
  listeners_.clear();
}

void ConnectionManager::declare_memory(const MemoryRegion& region) {
  for (const auto& transport : transports_) transport->declare_memory(region);
}

void ConnectionManager::forget_memory(std::uint64_t address, std::uint64_t bytes) {
  for (const auto& transport : transports_) transport->forget_memory(address, bytes);
}

bool ConnectionManager::reaches_declared_memory() const {
  return std::all_of(transports_.begin(), transports_.end(),
                     [](const auto& transport) { return transport->reaches_declared_memory(); });
}

}  // namespace dicomm
