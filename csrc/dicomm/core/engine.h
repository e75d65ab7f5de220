// The Communicator itself. One mutex guards all of it; one thread at a time moves bytes: a caller
// that waits, or else the engine's own thread.
//
//   engine.cpp    the public calls, and what happens when a peer fails
//   progress.cpp  who moves bytes when: spinning, sleeping, the engine's thread
//   meeting.cpp   how connections come to be: dialling, and judging who dials us
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/communicator.h"
#include "core/connection.h"
#include "core/contact.h"
#include "core/fd.h"
#include "core/fork.h"
#include "core/handshake.h"
#include "core/lobby.h"
#include "core/matching.h"
#include "core/request.h"
#include "core/transport.h"

namespace dicomm {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(std::shared_ptr<Store> store, const Options& options);
  ~Engine() { close(); }
  // One that lives, whoever holds it, until its process ends where that is a forked child: nothing
  // in there can be destroyed without the threads that the child lacks.
  static std::shared_ptr<Engine> create(std::shared_ptr<Store> store, const Options& options);
  void start();

  // False in a child that was forked from the process that made it.
  bool is_here() const { return origin_.is_here(); }
  void require_here() const;  // throws Error

  int rank() const { return me_.rank; }
  int world_size() const { return me_.world_size; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                                 std::int64_t ready_at_ns);
  std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer, std::uint64_t tag);
  void send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
            Communicator::Timeout timeout);
  std::size_t recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                   Communicator::Timeout timeout);
  void set_link(int peer, const LinkPace& pace);
  LinkPace link(int peer);
  std::uint64_t bytes_sent(int peer);
  LinkDescription describe_link(int peer);
  void declare_memory(const MemoryRegion& region);
  void forget_memory(std::uint64_t address, std::uint64_t bytes);
  bool reaches_declared_memory() const;
  std::string failure();
  void abort(const std::string& reason);
  void relay(const std::string& cause);
  void close();

  // For requests.
  void wait(RequestState& request, std::optional<std::chrono::milliseconds> timeout);
  void poll(const RequestState& request);
  void cancel(RequestState& request);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Time = std::chrono::steady_clock::time_point;

  struct Peer {
    std::unique_ptr<Connection> connection;
    bool dialling = false;
    std::string address;                // it published, once known
    std::string turned_away;            // why our last call was in vain
    std::string gone;                   // why no request with it can succeed any more
    std::deque<RequestState*> backlog;  // sends until it is connected
    Fd crossed;  // its own call, kept until ours is through: its end tells it that we died
    LinkPace pace;
    std::int64_t link_free_at_ns = 0;
    std::uint64_t bytes_sent = 0;

    Connection* live() const {
      return connection && !connection->ended() ? connection.get() : nullptr;
    }
  };
  struct Failure {
    Outcome outcome;
    std::string reason;
    std::string told_to_peers;  // who connect only now, too
  };

  // What epoll reports: an Event, and a rank.
  enum Event { wake_event, lobby_event, peer_event };

  // engine.cpp
  void open_transports();
  Lock lock();
  std::shared_ptr<Engine> unowned() { return {std::shared_ptr<void>(), this}; }
  Peer& checked_peer(int peer, const char* operation);
  void start_send(RequestState& request, std::int64_t ready_at_ns);  // both under the mutex
  void start_receive(RequestState& request);
  std::string describe(int peer) const;
  std::string describe(const RequestState& request) const;
  std::int64_t pace(Peer& peer, std::size_t bytes, std::int64_t ready_at_ns);
  bool refuse(RequestState& request);
  void fail_request(RequestState& request, Outcome outcome, const std::string& reason);
  // The first failure ends the communicator: tells the peers, then fails every request.
  void fail_all(Outcome outcome, const std::string& reason, const std::string& told_to_peers);
  void peer_left(int peer);
  void stream_ended(int peer, const StreamEnd& end);
  void linger(Lock& lock);

  // progress.cpp; under the mutex
  class Leadership;
  void settle(Connection& connection);
  void conclude(Connection& connection, const StreamEnd* end);
  void turn(Connection& connection);
  void turn_all(int awaited_peer);
  void drive_progress(Lock& lock, Time until, const RequestState* awaited = nullptr);
  bool ready_to_sleep();
  void leave_rest_to_leader();
  Time check_all_alive();
  void handle_event(Event event, int which);
  void serve_lobby();
  void kick();
  std::string hint_for(int peer) const;
  void block(Lock& lock, RequestState& request, Time deadline);
  void progress_loop();
  void look_out(RequestState& request);
  bool costly_to_poll(int peer) const;
  bool crowded() const;
  void watch(int fd, Event event, int which);
  void watch_peer(Connection& connection, bool writable);
  // progress.cpp; not under it
  bool turns(RequestState& request);
  void give_way(const RequestState& request);
  std::chrono::nanoseconds spin_time() const;

  // meeting.cpp
  void need_connection(int peer);
  void start_dialler(std::function<void()> body);
  void dial(int peer);
  Dialled call(const Contact& contact, std::size_t transport, int peer, const Deadline& deadline,
               const TransportCard& card, Fd& socket);
  void await_crossed_call(int peer, const Fd& socket);
  void unreachable(int peer, const std::string& reason);
  std::optional<Contact> find_contact(int peer);
  void connected(int peer, std::unique_ptr<Connection> connection);
  void validate(PendingConnection& pending);
  void finish_accepting(const PeerIdentity& peer, std::unique_ptr<Acceptor> acceptor, Fd caller);
  Transport& transport_of(const PendingConnection& pending);
  std::string addresses(int peer) const;

  const std::shared_ptr<Store> store_;
  const Options options_;
  const Origin origin_;
  const int pid_;
  Identity me_;
  Contact contact_;
  std::vector<std::unique_ptr<Transport>> transports_;  // in the registry's order, as the next two
  std::vector<std::size_t> doors_;                      // whose listener each one's callers come to
  std::vector<Fd> listeners_;
  const int cores_;

  std::mutex mutex_;
  std::atomic<int> wanting_lock_{0};  // threads that a spinning one keeps waiting
  Ledger ledger_;
  Matcher matcher_;
  std::vector<Peer> peers_;
  std::vector<int> live_;  // ranks of peers with a live connection
  std::atomic<int> same_host_peers_{0};
  Lobby lobby_;
  std::optional<Failure> failure_;
  std::atomic<bool> closing_{false};
  bool closed_ = false;

  Fd epoll_;
  Fd wake_;
  bool leading_ = false;   // someone moves bytes in drive_progress()
  bool sleeping_ = false;  // and is asleep in it
  bool stop_ = false;
  bool parked_ = false;        // the engine's thread waits until no caller leads
  int shared_core_turns_ = 0;  // how often in a row a waiting thread met its peer on its core
  Time next_check_{};          // that peers are alive
  bool touched_ = false;       // a call came from outside since the engine's thread looked
  std::condition_variable progress_wanted_;
  std::thread progress_thread_;
  std::vector<std::thread> diallers_;
};

}  // namespace dicomm
