// Who moves bytes when.
//
// A caller in wait() spins briefly, moving bytes itself; then it leads: it sleeps until something
// happens, and moves bytes for everybody. Where no caller waits the engine's thread leads. While
// calls come in quick succession that thread keeps out of their way and looks in once a
// millisecond, because waking it for every message would cost more than the message.
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "core/clock.h"
#include "core/engine.h"
#include "core/host.h"
#include "core/text.h"

namespace dicomm {

namespace {

constexpr std::chrono::milliseconds kNap{1};
constexpr std::chrono::milliseconds kLongNap{10};  // where it takes the only core
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kCrowdedSpin{2};
constexpr std::chrono::milliseconds kYieldingSpin{1};
constexpr int kLooksWithSharing = 100;  // looks, a few hundred microseconds
constexpr int kTurnsBetweenClocks = 32;
constexpr int kFewTurns = 2;  // where each costs much, or keeps the peer from its core
constexpr int kLooksBeforeClock = 4;
constexpr std::chrono::seconds kCheckEvery{5};  // that peers are alive
constexpr timespec kShortSleep{0, 20'000};

// The scheduler leaves two threads that keep waking each other on one core; it moves this one at
// once where the core is forbidden to it for a moment.
void leave_core(int core) {
  cpu_set_t allowed, others;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0) return;
  ::sched_setaffinity(0, sizeof others, &others);
  ::sched_setaffinity(0, sizeof allowed, &allowed);
}

// Lets the kernel's threads have the only core for a moment: those of a device's driver, say, which
// move the bytes. A yield would also give away the rest of this thread's time slice, and the
// scheduler would favour the others for as long; so, however, it often switches to the peer as soon
// as the driver is done.
void nap() { ::nanosleep(&kShortSleep, nullptr); }

}  // namespace

void Engine::start() {
  if (me_.world_size > 1) {
    watch(lobby_.fd(), lobby_event, 0);
    open_transports();
    store_->set(contact_key(options_.name, me_.rank), contact_.encode());
  }
  watch(wake_.get(), wake_event, 0);
  try {
    progress_thread_ = std::thread([this] { progress_loop(); });
  } catch (const std::system_error& error) {
    throw Error(text("no thread left to communicate with: ", error.what()));
  }
}

namespace {

epoll_event wanted(int event, int which, std::uint32_t events) {
  epoll_event result{};
  result.events = events;
  result.data.u64 = static_cast<std::uint64_t>(event) << 32 | static_cast<std::uint32_t>(which);
  return result;
}

}  // namespace

void Engine::watch(int fd, Event event, int which) {
  epoll_event reading = wanted(event, which, EPOLLIN);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &reading);
}

void Engine::watch_peer(Connection& connection, bool writable) {
  connection.watching_writable = writable;
  epoll_event changed =
      wanted(peer_event, connection.peer().rank, writable ? EPOLLIN | EPOLLOUT : EPOLLIN);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.stream().fd(), &changed);
}

namespace {

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

// Writes what fits; if that is not all, sees to it that someone writes the rest.
void Engine::settle(Connection& connection) {
  const auto end = end_after([&] {
    const bool blocked = !connection.flush();
    Stream& stream = connection.stream();
    if (stream.watch_writable()) {
      if (blocked != connection.watching_writable) watch_peer(connection, blocked);
    } else if (blocked && sleeping_ && !stream.prepare_sleep(true)) {
      kick();
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
void Engine::conclude(Connection& connection, const StreamEnd* end) {
  const int rank = connection.peer().rank;
  if (!connection.abort_reason().empty() && !failure_ && !closing_)
    fail_all(Outcome::peer_error, connection.abort_reason(), connection.abort_reason());
  if (connection.ended()) return;
  if (connection.has_left())
    peer_left(rank);
  else if (end)
    stream_ended(rank, *end);
}

// One look at a connection: reads, copies, writes, and draws the conclusions.
void Engine::turn(Connection& connection) {
  const auto end = end_after([&] {
    connection.receive();
    connection.pull();
  });
  conclude(connection, end ? &*end : nullptr);
  if (!connection.ended() && connection.has_output()) settle(connection);
}

// Looks at every connection where looking is free, and at the awaited one.
void Engine::turn_all(int awaited_peer) {
  for (std::size_t i = 0; i < live_.size(); ++i) {
    Connection& connection = *peers_[live_[i]].connection;
    if (!connection.stream().cheap_to_poll() && awaited_peer != Communicator::any_source &&
        awaited_peer != live_[i])
      continue;
    turn(connection);
  }
}

bool Engine::costly_to_poll(int peer) const {
  if (peer == Communicator::any_source) return false;
  const Connection* connection = peers_[peer].live();
  return connection && !connection->stream().cheap_to_poll();
}

void Engine::poll(const RequestState& request) {
  require_here();
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  touched_ = true;
  turn_all(request.peer_number);
  leave_rest_to_leader();
}

bool Engine::ready_to_sleep() {
  bool ready = true;
  for (const int rank : live_) {
    Connection& connection = *peers_[rank].connection;
    ready &= connection.stream().prepare_sleep(connection.has_output());
    ready &= !connection.has_pulls();
  }
  return ready;
}

// A caller that moved bytes while the leader slept may go away with some half done, or read ahead,
// of which no descriptor tells.
void Engine::leave_rest_to_leader() {
  if (sleeping_ && !ready_to_sleep()) kick();
}

class Engine::Leadership {
 public:
  Leadership(Engine& engine, const RequestState* awaited) : engine_(engine) {
    engine.leading_ = true;
    engine.ledger_.awaited_by_leader = awaited;
  }
  // Whatever happened: nobody could ever lead again.
  ~Leadership() {
    engine_.ledger_.awaited_by_leader = nullptr;
    engine_.leading_ = false;
    if (engine_.ledger_.sleepers > 0) engine_.ledger_.changed.notify_all();
    if (engine_.parked_) engine_.progress_wanted_.notify_all();
  }

 private:
  Engine& engine_;
};

// Moves bytes; sleeps until there is a reason not to, or `until`. Leaves after one round.
void Engine::drive_progress(Lock& lock, Time until, const RequestState* awaited) {
  const Leadership leadership(*this, awaited);
  turn_all(Communicator::any_source);
  const Time lobby_time = lobby_.wake_at();
  until = std::min({until, lobby_time, check_all_alive()});
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  int timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
  if (stop_ || (awaited && awaited->done) || (timeout_ms > 0 && !ready_to_sleep())) timeout_ms = 0;
  epoll_event events[32];
  sleeping_ = timeout_ms > 0;
  lock.unlock();
  const int count = ::epoll_wait(epoll_.get(), events, 32, timeout_ms);
  lock.lock();
  sleeping_ = false;
  for (const int rank : live_) peers_[rank].connection->stream().woke();
  for (int i = 0; i < count; ++i)
    handle_event(static_cast<Event>(events[i].data.u64 >> 32),
                 static_cast<int>(events[i].data.u64 & 0xffffffff));
  if (lobby_time <= Clock::now()) serve_lobby();
  if (count > 0) turn_all(me_.rank);
}

// Returns when to come again.
Engine::Time Engine::check_all_alive() {
  if (live_.empty()) return Time::max();
  const Time now = Clock::now();
  if (now < next_check_) return next_check_;
  next_check_ = now + kCheckEvery;
  for (const int rank : std::vector<int>(live_)) {
    Connection* connection = peers_[rank].live();
    if (!connection) continue;
    try {
      connection->stream().check_alive();
    } catch (const StreamEnd& end) {
      conclude(*connection, &end);
    }
  }
  return next_check_;
}

// A caller costs nobody but itself, not even where memory is short.
void Engine::serve_lobby() {
  try {
    lobby_.serve();
  } catch (const std::exception& error) {
    lobby_.last_refusal = error.what();
  }
}

void Engine::handle_event(Event event, int which) {
  switch (event) {
    case wake_event: {
      std::uint64_t count;
      (void)!::read(wake_.get(), &count, sizeof count);
      return;
    }
    case lobby_event:
      return serve_lobby();
    case peer_event:
      if (Connection* connection = peers_[which].live()) {
        connection->stream().on_event();
        turn(*connection);
      }
      return;
  }
}

void Engine::kick() {
  if (!sleeping_) return;
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

bool Engine::crowded() const { return same_host_peers_ + 1 > cores_; }

// Spinning helps only while the peer has a core of its own.
std::chrono::nanoseconds Engine::spin_time() const {
  if (!crowded()) return kSpin;
  return cores_ == 1 ? kYieldingSpin : kCrowdedSpin;
}

// Looks out for the request's end for less than a microsecond, or until another thread wants in.
void Engine::look_out(RequestState& request) {
  const bool few = cores_ == 1 || costly_to_poll(request.peer_number);
  const int most = few ? kFewTurns : kTurnsBetweenClocks;
  for (int i = 0; !request.done && wanting_lock_ == 0 && i < most; ++i)
    turn_all(request.peer_number);
  touched_ = true;
  if (request.done) leave_rest_to_leader();
}

bool Engine::turns(RequestState& request) {
  if (const Lock held(mutex_, std::try_to_lock); held) look_out(request);
  return request.finished();
}

// Where the awaited peer, or whoever else answers, can only run on this core, it should.
void Engine::give_way(const RequestState& request) {
  if (wanting_lock_ > 0) return static_cast<void>(::sched_yield());
  const int core = ::sched_getcpu();
  bool shared = false, cheap = true, part = false;
  bool busy = request.is_send;  // a long message, or many
  if (Lock held(mutex_, std::try_to_lock); held) {
    const int awaited_peer = request.peer_number;
    for (const int rank : live_)
      if (rank == awaited_peer || awaited_peer == Communicator::any_source) {
        const Connection& connection = *peers_[rank].connection;
        Stream& stream = connection.stream();
        busy |= connection.pulling();
        shared |= stream.peer_shares_core(core);
        cheap &= stream.cheap_to_poll();
      }
    shared_core_turns_ = shared && cheap ? shared_core_turns_ + 1 : 0;
    part = shared_core_turns_ >= kLooksWithSharing && me_.rank < awaited_peer && !crowded();
    if (part) shared_core_turns_ = 0;
  }
  if (part) leave_core(core);
  if (cores_ == 1 && crowded() && cheap && !shared && !busy)
    nap();
  else if (shared || cores_ == 1)
    ::sched_yield();
}

void Engine::wait(RequestState& request, std::optional<std::chrono::milliseconds> timeout) {
  require_here();
  // Most are done before it pays to ask a clock: that can be a system call.
  for (int i = 0; i < kLooksBeforeClock; ++i) {
    if (turns(request)) return;
    give_way(request);
  }
  const Time deadline = deadline_after(timeout.value_or(options_.timeout));
  const Time spin_until = std::min(Clock::now() + spin_time(), deadline);
  do {
    if (turns(request)) return;
    give_way(request);
  } while (Clock::now() < spin_until);
  Lock held = lock();
  if (request.posted_at_ns == 0) request.posted_at_ns = now_ns();
  block(held, request, deadline);
  if (request.done) return;
  const std::string hint = hint_for(request.peer_number);
  throw TimeoutError(text(describe(request), ": not done after ", seconds(request.age()), hint));
}

// What may explain a wait in vain.
std::string Engine::hint_for(int rank) const {
  std::string hint;
  if (rank != Communicator::any_source && !peers_[rank].live()) {
    const Peer& peer = peers_[rank];
    hint = text("; rank ", rank, " is not connected yet", addresses(rank));
    if (!peer.turned_away.empty()) hint += "; the last call failed as " + peer.turned_away;
  }
  if (!lobby_.last_refusal.empty())
    hint += text("; a connection was refused: ", lobby_.last_refusal);
  return hint;
}

void Engine::block(Lock& lock, RequestState& request, Time deadline) {
  while (!request.done && Clock::now() < deadline) {
    touched_ = true;
    if (!leading_) {
      drive_progress(lock, deadline, &request);
    } else {
      // The engine's thread gives way; two callers must not keep waking each other.
      if (!ledger_.awaited_by_leader) kick();
      ++ledger_.sleepers;
      ledger_.changed.wait_until(lock, deadline);
      --ledger_.sleepers;
    }
  }
}

void Engine::progress_loop() {
  Lock lock(mutex_);
  while (!stop_) {
    const bool busy = std::exchange(touched_, false);
    if (busy) {
      progress_wanted_.wait_for(lock, cores_ == 1 ? kLongNap : kNap);
      if (!leading_ && !stop_) drive_progress(lock, Clock::now());
    } else if (leading_) {
      parked_ = true;
      progress_wanted_.wait(lock, [&] { return stop_ || !leading_; });
      parked_ = false;
    } else {
      drive_progress(lock, Time::max());
    }
  }
}

}  // namespace dicomm
