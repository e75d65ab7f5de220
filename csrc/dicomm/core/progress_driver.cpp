#include "core/progress_driver.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "core/host.h"
#include "core/text.h"

namespace dicomm {

namespace {

constexpr std::chrono::milliseconds kNap{1};
constexpr std::chrono::milliseconds kLongNap{10};  // where it takes the only core
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kCrowdedSpin{2};
constexpr std::chrono::milliseconds kYieldingSpin{1};
// A wait in which cores are handed over is this much shorter than one that sleeps and is woken.
// Handing over may lose what it has saved so far, of which no more than kMostSaved is remembered,
// and beyond that one part in kMostTimeLost of a waiting thread's time.
constexpr std::chrono::nanoseconds kSavedByHandingOver = std::chrono::microseconds{5};
constexpr std::chrono::nanoseconds kMostSaved = std::chrono::milliseconds{20};
constexpr int kMostTimeLost = 100;
// Looks before a thread leaves its peer the core, a few hundred microseconds; twice as many each
// time that the scheduler put it back within so short a time, as it does where somebody else keeps
// the other cores busy.
constexpr int kLooksWithSharing = 100, kMostLooksWithSharing = 1 << 20;
constexpr std::chrono::milliseconds kSoonPutBack{20};
constexpr int kTurnsBetweenClocks = 32;
constexpr int kFewTurns = 2;  // where each costs much, or keeps the peer from its core
constexpr int kLooksBeforeClock = 4;
constexpr std::chrono::milliseconds kDrainTurn{20};
constexpr std::chrono::milliseconds kQuickChipWork{1};  // longer work is looked at once in as long
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

ProgressDriver::ProgressDriver(int rank, Guard& guard, Poller& poller, Ledger& ledger,
                               ChipQueue& chip_queue, ConnectionManager& connections)
    : rank_(rank),
      cores_(usable_cores()),
      guard_(guard),
      poller_(poller),
      ledger_(ledger),
      chip_queue_(chip_queue),
      connections_(connections),
      turns_before_parting_(kLooksWithSharing) {
  ledger_.wake_leader = [this] { poller_.wake(); };
}

void ProgressDriver::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw Error(text("no thread left to communicate with: ", error.what()));
  }
}

class ProgressDriver::Leadership {
 public:
  Leadership(ProgressDriver& driver, const RequestState* awaited) : driver_(driver) {
    driver.leading_ = true;
    driver.ledger_.awaited_by_leader = awaited;
  }
  // Whatever happened: nobody could ever lead again.
  ~Leadership() {
    driver_.ledger_.awaited_by_leader = nullptr;
    driver_.leading_ = false;
    if (driver_.ledger_.sleepers > 0) driver_.ledger_.changed.notify_all();
    if (driver_.parked_ || driver_.chip_busy()) driver_.wanted_.notify_all();
  }

 private:
  ProgressDriver& driver_;
};

void ProgressDriver::turn(int awaited_peer) {
  chip_queue_.look();
  connections_.turn_all(awaited_peer);
}

// Moves bytes; sleeps until there is a reason not to, or `until`. Leaves after one round.
void ProgressDriver::lead(Lock& lock, Time until, const RequestState* awaited) {
  const Leadership leadership(*this, awaited);
  turn(Communicator::any_source);
  const Time lobby_time = connections_.lobby_wakes_at();
  until = std::min({until, lobby_time, connections_.check_alive(), next_look_at_chip()});
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  int timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
  // The thread of its own that only looks in gets ready, too: where no caller ever sleeps, idle
  // connections would never come to rest. It does not while it watches a chip's quick work.
  const bool watches = timeout_ms == 0 && (awaited || chip_busy());
  const bool busy = stop_ || (awaited && (awaited->done || stays_awake())) || watches;
  const bool ready = !busy && connections_.ready_to_sleep();
  if (!ready) timeout_ms = 0;
  const int count = poller_.sleep(lock, timeout_ms);
  connections_.woke(ready);
  for (int i = 0; i < count; ++i) connections_.handle(poller_.event(i));
  if (lobby_time <= Clock::now()) connections_.serve_lobby();
  if (count > 0) turn(rank_);
}

// The other end has but one piece left to copy when this one is through.
bool ProgressDriver::stays_awake() {
  const Time now = Clock::now();
  if (connections_.copied() && !connections_.crowded()) awake_until_ = now + kSpin;
  return now < awake_until_;
}

std::optional<ProgressDriver::Time> ProgressDriver::chip_works_since() const {
  const auto copies = connections_.chip_copies_since(), requests = chip_queue_.waits_since();
  return copies && requests ? std::max(*copies, *requests) : copies ? copies : requests;
}

// No descriptor tells that a chip's work is through.
ProgressDriver::Time ProgressDriver::next_look_at_chip() const {
  const auto since = chip_works_since();
  if (!since) return Time::max();
  const Time now = Clock::now();
  return now - *since < kQuickChipWork ? now : now + kQuickChipWork;
}

void ProgressDriver::look_at_chip() {
  wanted_.notify_all();
  poller_.wake();
}

// A caller that moved bytes while the leader slept may go away with some half done, or read ahead,
// of which no descriptor tells.
void ProgressDriver::leave_rest_to_leader() {
  const bool busy = chip_busy();
  if (busy) wanted_.notify_all();
  if (poller_.sleeping() && (busy || !connections_.ready_to_sleep())) poller_.wake();
}

void ProgressDriver::run() {
  Lock lock(guard_.mutex);
  while (!stop_) {
    const bool busy = std::exchange(touched_, false);
    if (busy) {
      wanted_.wait_for(lock, cores_ == 1 ? kLongNap : kNap);
      if (!leading_ && !stop_) lead(lock, Clock::now());
    } else if (leading_) {
      parked_ = true;
      wanted_.wait(lock, [&] { return stop_ || !leading_; });
      parked_ = false;
    } else {
      lead(lock, Time::max());
    }
  }
}

void ProgressDriver::poll(const RequestState& request) {
  Lock lock(guard_.mutex, std::try_to_lock);
  if (!lock) return;
  touched_ = true;
  turn(request.peer_number);
  leave_rest_to_leader();
}

bool ProgressDriver::costly_to_poll(int rank) const {
  if (rank == Communicator::any_source) return false;
  const Connection* connection = connections_.live(rank);
  return connection && !connection->stream().cheap_to_poll();
}

void ProgressDriver::look_out(RequestState& request) {
  const bool few = connections_.crowded() || costly_to_poll(request.peer_number);
  const int most = few ? kFewTurns : kTurnsBetweenClocks;
  for (int i = 0; !request.done && guard_.wanting == 0 && i < most; ++i) turn(request.peer_number);
  touched_ = true;
  if (request.done) leave_rest_to_leader();
}

bool ProgressDriver::finds_done(RequestState& request) {
  if (const Lock held(guard_.mutex, std::try_to_lock); held) look_out(request);
  return request.finished();
}

// Spinning helps only while the peer has a core of its own. Where there are fewer cores than ranks,
// to hand this core over costs a fraction of what it does to sleep and be woken.
std::chrono::nanoseconds ProgressDriver::spin_time() const {
  if (!connections_.crowded()) return kSpin;
  return cores_ == 1 || hands_over_core() ? kYieldingSpin : kCrowdedSpin;
}

bool ProgressDriver::hands_over_core() const {
  return connections_.crowded() && rough_now_ns() >= hand_over_again_at_ns_;
}

// Who gets it and computes keeps it for a time slice, while one who sleeps is woken at once. That
// is made up for by what handing over has saved before, or else by not doing so for a while.
void ProgressDriver::hand_over_core() {
  const Time before = Clock::now();
  ::sched_yield();
  const std::chrono::nanoseconds lost = Clock::now() - before;
  if (lost <= kYieldingSpin) return;
  const std::int64_t left_ns = saved_ns_ - lost.count();
  saved_ns_ = std::max<std::int64_t>(left_ns, 0);
  if (left_ns < 0) hand_over_again_at_ns_ = now_ns() - kMostTimeLost * left_ns;
}

void ProgressDriver::count_saved() {
  saved_ns_ = std::min<std::int64_t>(saved_ns_ + kSavedByHandingOver.count(), kMostSaved.count());
}

// Counts how often in a row a waiting thread found its peer on its core; whether that is often
// enough to leave.
bool ProgressDriver::met_on_core(bool shared) {
  shared_core_turns_ = shared ? shared_core_turns_ + 1 : 0;
  if (shared_core_turns_ == 1) stayed_apart_ = Clock::now() - parted_at_ > kSoonPutBack;
  return shared_core_turns_ >= turns_before_parting_;
}

void ProgressDriver::note_parting() {
  shared_core_turns_ = 0;
  turns_before_parting_ = stayed_apart_
                              ? kLooksWithSharing
                              : std::min(2 * turns_before_parting_, kMostLooksWithSharing);
  parted_at_ = Clock::now();
}

// Where the awaited peer, or whoever else answers, can only run on this core, it should.
void ProgressDriver::give_way(const RequestState& request) {
  if (guard_.wanting > 0) return static_cast<void>(::sched_yield());
  if (cores_ > 1 && hands_over_core()) return hand_over_core();
  const int core = ::sched_getcpu();
  bool shared = false, cheap = true, part = false;
  bool busy = request.is_send;  // a long message, or many
  if (Lock held(guard_.mutex, std::try_to_lock); held) {
    const int awaited_peer = request.peer_number;
    const bool may_part = rank_ < awaited_peer && !connections_.crowded();
    for (const int rank : connections_.live_ranks())
      if (rank == awaited_peer || awaited_peer == Communicator::any_source) {
        const Connection& connection = *connections_.connection(rank);
        Stream& stream = connection.stream();
        busy |= connection.pulling();
        cheap &= stream.cheap_to_poll();
        shared |= (stream.cheap_to_poll() || may_part) && stream.peer_shares_core(core);
      }
    part = met_on_core(shared) && may_part;
    if (part) note_parting();
  }
  if (part) leave_core(core);
  if (cores_ == 1 && connections_.crowded() && cheap && !shared && !busy)
    nap();
  else if (shared || !cheap || cores_ == 1)  // a costly look costs more than giving way
    ::sched_yield();
}

bool ProgressDriver::finds_done_next(RequestState& request) {
  give_way(request);
  if (!finds_done(request)) return false;
  if (hands_over_core()) count_saved();
  return true;
}

bool ProgressDriver::wait(RequestState& request, std::chrono::milliseconds timeout) {
  if (finds_done(request)) return true;
  // Most are done before it pays to ask a clock: that can be a system call.
  for (int i = 1; i < kLooksBeforeClock; ++i)
    if (finds_done_next(request)) return true;
  const Time deadline = deadline_after(timeout);
  const Time spin_until = std::min(Clock::now() + spin_time(), deadline);
  do {
    if (finds_done_next(request)) return true;
  } while (Clock::now() < spin_until);
  Lock held = guard_.lock();
  if (request.posted_at_ns == 0) request.posted_at_ns = now_ns();
  block(held, request, deadline);
  return request.done;
}

void ProgressDriver::await_change(Lock& lock, Time deadline) {
  ++ledger_.sleepers;
  ledger_.changed.wait_until(lock, deadline);
  --ledger_.sleepers;
}

void ProgressDriver::block(Lock& lock, RequestState& request, Time deadline) {
  while (!request.done && Clock::now() < deadline) {
    touched_ = true;
    if (!leading_) {
      lead(lock, deadline, &request);
    } else {
      // The driver's thread gives way; two callers must not keep waking each other.
      if (!ledger_.awaited_by_leader) poller_.wake();
      await_change(lock, deadline);
    }
  }
}

template <class F>
void ProgressDriver::lead_until(Lock& lock, Time deadline, F&& reached) {
  while (Clock::now() < deadline && !reached()) {
    if (leading_) {
      poller_.wake();
      await_change(lock, deadline);
    } else {
      lead(lock, std::min(deadline, Clock::now() + kDrainTurn));
    }
  }
}

void ProgressDriver::finish_chip_copies(Lock& lock, std::uint32_t context, Time deadline) {
  lead_until(lock, deadline, [&] { return !connections_.has_chip_copies(context); });
}

void ProgressDriver::finish_requests(Lock& lock, std::uint32_t context) {
  lead_until(lock, Time::max(), [&] { return !ledger_.holds(context); });
}

void ProgressDriver::drain(Lock& lock, Time deadline) {
  lead_until(lock, deadline, [this] { return connections_.handed_over(); });
}

void ProgressDriver::stop(Lock& lock) {
  stop_ = true;
  wanted_.notify_all();
  poller_.wake();
  // A caller that leads finds its request done, and leaves.
  ++ledger_.sleepers;
  ledger_.changed.wait(lock, [this] { return !leading_; });
  --ledger_.sleepers;
}

void ProgressDriver::join() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace dicomm
