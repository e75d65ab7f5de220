// The sends and receives of one communicator: started here, matched with messages, and failed where
// they cannot end otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/communicator.h"
#include "core/connection.h"
#include "core/guard.h"
#include "core/request.h"

namespace dicomm {

class Engine;

class Requests final : public std::enable_shared_from_this<Requests> {
 public:
  // Opens it with the engine; close it there. Like the engine it lives on in a forked child. ranks:
  // the world rank of each rank. Throws Error.
  static std::shared_ptr<Requests> create(std::shared_ptr<Engine> engine, const Options& options,
                                          std::uint32_t context, const std::vector<int>& ranks);

  const Options& options() const { return options_; }
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<Engine>& shared_engine() const { return engine_; }
  std::uint32_t context() const { return context_; }
  int world_rank(int rank) const { return peers_.at(rank).world_rank; }
  // -1: no rank of this communicator; that is any_source, too.
  int rank_of(int world_rank) const { return world_rank < 0 ? -1 : rank_of_[world_rank]; }
  bool has_member(int world_rank) const { return rank_of(world_rank) >= 0; }
  // Whether it is a member that has not left.
  bool counts_on(int world_rank) const {
    return has_member(world_rank) && peers_[rank_of(world_rank)].gone.empty();
  }

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

  // The rest is under the mutex. Whether nobody began before.
  bool begins_to_close() { return !std::exchange(closes_, true); }
  // Fails every request, refuses new ones, and tells the peers.
  void close();
  void chip_is_through(RequestState& request);
  void chip_failed(RequestState& request, const char* what);
  // What is told of peers, by their world ranks.
  void peer_connected(int world_rank, Connection& connection);
  void peer_joined(int world_rank);
  void peer_left(int world_rank, const std::string& how);
  void peer_failed(const std::string& reason);

 private:
  struct Failure {
    Outcome outcome;
    std::string reason, told_to_peers;
  };
  struct Peer {
    int world_rank = 0;
    std::string gone;     // why no request with it can succeed any more; empty: one can
    bool wanted = false;  // it is to be told that this side counts on it
    bool told = false;
    // What is sent to it.
    LinkPace pace;
    std::int64_t link_free_at_ns = 0;
    std::uint64_t bytes_sent = 0;
    std::vector<RequestState*> backlog;  // until it is connected
  };

  Requests(std::shared_ptr<Engine> engine, const Options& options, std::uint32_t context,
           const std::vector<int>& ranks);

  // Its world rank. Throws Error.
  int checked_peer(int peer, const char* operation) const {
    if (peer < 0 || peer >= options_.world_size || peer == options_.rank)
      throw_no_such_peer(peer, operation);
    return peers_[peer].world_rank;
  }
  [[noreturn]] void throw_no_such_peer(int peer, const char* operation) const;
  Peer& peer_of(const RequestState& request) { return peers_[rank_of(request.peer_number)]; }
  const std::string& gone(const Peer& peer) const;
  bool all_gone() const;
  std::string describe(const RequestState& request) const;
  std::string failure_of(const RequestState& request, const std::string& reason) const;
  std::string hint(const RequestState& request) const;
  // Under the mutex.
  void add(RequestState& request);
  bool send_at_once(RequestState& request);
  void start_send(RequestState& request, std::int64_t ready_at_ns);
  void start_receive(RequestState& request);
  bool waits_for_chip(RequestState& request);
  void hand_over(RequestState& request, std::int64_t ready_at_ns);
  void post(RequestState& request);
  static std::int64_t pace(Peer& peer, std::size_t bytes, std::int64_t ready_at_ns);
  Connection* reach(Peer& peer);
  void join(Peer& peer, Connection& connection);
  bool refuse(RequestState& request);
  void fail_hopeless(RequestState& request);
  void fail(RequestState& request, Outcome outcome, const std::string& reason);
  void let_go(RequestState& request, Outcome outcome, const std::string& reason);
  template <class F>
  void for_each_request(F&& visit);
  template <class F>
  void for_each_joined(F&& visit);
  void forget_queued();
  void let_all_go(Outcome outcome, const std::string& reason);
  // The first failure ends the communicator: tells the peers, then fails every request.
  void fail_all(Outcome outcome, const std::string& reason, const std::string& told_to_peers);

  const std::shared_ptr<Engine> engine_;
  const Options options_;
  const std::uint32_t context_;
  std::vector<Peer> peers_;   // by rank
  std::vector<int> rank_of_;  // by world rank
  bool closes_ = false;       // somebody sees to it
  bool closing_ = false;      // refuses requests
  std::optional<Failure> failure_;
  std::atomic<bool> paced_{false};  // whether any link ever was
};

}  // namespace dicomm
