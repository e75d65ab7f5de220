// The sends and receives of a communicator: started here, matched with messages, and failed where
// they cannot end otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/chip_queue.h"
#include "core/communicator.h"
#include "core/connection_manager.h"
#include "core/guard.h"
#include "core/matching.h"
#include "core/progress_driver.h"
#include "core/request.h"

namespace dicomm {

class Engine;

class Requests final : public ConnectionEvents {
 public:
  Requests(Engine& engine, const Options& options, const Identity& me, Guard& guard, Poller& poller,
           ConnectionManager& connections, ProgressDriver& progress);

  // See Communicator.
  std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                                 std::int64_t ready_at_ns,
                                 std::shared_ptr<ChipBuffer> chip = nullptr,
                                 std::shared_ptr<ChipWork> after = nullptr);
  std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                                 std::shared_ptr<ChipBuffer> chip = nullptr,
                                 std::shared_ptr<ChipWork> after = nullptr);
  void start(RequestState& request, std::int64_t ready_at_ns);
  void send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
            Communicator::Timeout timeout);
  std::size_t recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                   Communicator::Timeout timeout);
  void set_link(int peer, const LinkPace& pace);
  LinkPace link(int peer);
  std::uint64_t bytes_sent(int peer);
  LinkDescription describe_link(int peer);
  void abort(const std::string& reason);
  void relay(const std::string& cause);
  std::string failure();

  // For a request itself. Throws TimeoutError.
  void wait(RequestState& request, Communicator::Timeout timeout);
  // Waits until nobody else reads or writes the buffer.
  void cancel(RequestState& request);

  // Under the mutex: fails every request, and refuses new ones.
  void close();

  Ledger& ledger() { return ledger_; }
  Matcher& matcher() { return matcher_; }
  ChipQueue& chip_queue() { return chip_queue_; }

 private:
  struct Failure {
    Outcome outcome;
    std::string reason;
  };
  // What is sent to a peer.
  struct Outgoing {
    LinkPace pace;
    std::int64_t link_free_at_ns = 0;
    std::uint64_t bytes_sent = 0;
    std::deque<RequestState*> backlog;  // until it is connected
  };

  Outgoing& checked_peer(int peer, const char* operation);
  std::string describe(const RequestState& request) const;
  // Under the mutex.
  void start_send(RequestState& request, std::int64_t ready_at_ns);
  void start_receive(RequestState& request);
  bool waits_for_chip(RequestState& request);
  void hand_over(RequestState& request, std::int64_t ready_at_ns);
  void post(RequestState& request);
  static std::int64_t pace(Outgoing& peer, std::size_t bytes, std::int64_t ready_at_ns);
  bool refuse(RequestState& request);
  void fail(RequestState& request, Outcome outcome, const std::string& reason);
  void forget_queued();
  // The first failure ends the communicator: tells the peers, then fails every request.
  void fail_all(Outcome outcome, const std::string& reason, const std::string& told_to_peers);

  void peer_connected(int rank, Connection& connection) override;
  void peer_left(int rank) override;
  void peer_failed(const std::string& reason) override;

  Engine& engine_;  // every request keeps it
  const Options& options_;
  const Identity& me_;
  Guard& guard_;
  Poller& poller_;
  ConnectionManager& connections_;
  ProgressDriver& progress_;

  bool closing_ = false;
  std::optional<Failure> failure_;
  std::vector<Outgoing> outgoing_;  // by rank
  std::atomic<bool> paced_{false};  // whether any link ever was
  Ledger ledger_;
  Matcher matcher_;
  ChipQueue chip_queue_;
};

}  // namespace dicomm
