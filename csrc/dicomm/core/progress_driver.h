// Who moves bytes when.
//
// A caller in wait() spins briefly, moving bytes itself, and where this host has more ranks than
// cores it hands its core over after each look; then it leads: it sleeps until something
// happens, and moves bytes for everybody. Where no caller waits the driver's own thread leads.
// While calls come in quick succession that thread keeps out of their way and looks in once a
// millisecond, because waking it for every message would cost more than the message.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <optional>
#include <thread>

#include "core/chip_queue.h"
#include "core/connection_manager.h"
#include "core/guard.h"
#include "core/poller.h"
#include "core/request.h"

namespace dicomm {

class ProgressDriver {
 public:
  using Time = std::chrono::steady_clock::time_point;

  ProgressDriver(int rank, Guard& guard, Poller& poller, Ledger& ledger, ChipQueue& chip_queue,
                 ConnectionManager& connections);
  void start();  // throws Error

  // Not under the mutex. Until the request is done, or so long; whether it is.
  bool wait(RequestState& request, std::chrono::milliseconds timeout);
  // One look, unless another thread is at it.
  void poll(const RequestState& request);

  // Under the mutex. A request starts: the driver's thread keeps out of the way for a while.
  void touch() { touched_ = true; }
  // A request waits for the chip, whom somebody has to ask from now on.
  void look_at_chip();
  // Looks out for the request's end for less than a microsecond, or until another thread wants in.
  void look_out(RequestState& request);
  // Lets others in meanwhile, as the next four do: sleeps until the request is done, or
  // `deadline`.
  void block(Lock& lock, RequestState& request, Time deadline);
  // Until the chip has copied all that peers hold for that communicator, or `deadline`.
  void finish_chip_copies(Lock& lock, std::uint32_t context, Time deadline);
  // Until no request of that communicator, which is closed, is left.
  void finish_requests(Lock& lock, std::uint32_t context);
  // Until everything that connections have to say is handed over, or `deadline`.
  void drain(Lock& lock, Time deadline);
  // Nobody moves bytes afterwards but the driver's thread, which join() waits for.
  void stop(Lock& lock);
  void join();

 private:
  class Leadership;

  void run();
  void lead(Lock& lock, Time until, const RequestState* awaited = nullptr);
  bool stays_awake();
  void turn(int awaited_peer);
  bool chip_busy() const { return !chip_queue_.empty() || connections_.copies_by_chip(); }
  std::optional<Time> chip_works_since() const;
  Time next_look_at_chip() const;
  template <class F>
  void lead_until(Lock& lock, Time deadline, F&& reached);
  void await_change(Lock& lock, Time deadline);
  void leave_rest_to_leader();
  bool costly_to_poll(int rank) const;
  // Not under the mutex.
  bool finds_done(RequestState& request);
  bool finds_done_next(RequestState& request);  // gives way first
  void give_way(const RequestState& request);
  bool met_on_core(bool shared);
  void note_parting();
  bool hands_over_core() const;
  void hand_over_core();
  void count_saved();
  std::chrono::nanoseconds spin_time() const;

  const int rank_;
  const int cores_;
  Guard& guard_;
  Poller& poller_;
  Ledger& ledger_;
  ChipQueue& chip_queue_;
  ConnectionManager& connections_;

  bool leading_ = false;  // someone moves bytes in lead()
  bool stop_ = false;
  bool parked_ = false;   // the driver's thread waits until no caller leads
  bool touched_ = false;  // a call came from outside since that thread looked
  Time awake_until_{};    // for a caller that leads
  std::atomic<std::int64_t> hand_over_again_at_ns_{0};  // until then others compute here
  std::atomic<std::int64_t> saved_ns_{0};               // by handing over, and not lost by that yet
  int shared_core_turns_ = 0;  // how often in a row a waiting thread met its peer on its core
  int turns_before_parting_;   // then this thread leaves it
  Time parted_at_{};
  bool stayed_apart_ = true;  // after that, until they met again
  std::condition_variable wanted_;
  std::thread thread_;
};

}  // namespace dicomm
