// The connections with the other ranks: how each comes to be, what moves over it, how it ends. The
// communicators that share them come and go meanwhile; a rank is one of the first of these, its
// world rank.
//
//   connecting.cpp           dialling, and judging who dials us
//   connection_manager.cpp   a connection's life from then on
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/communicator.h"
#include "core/connection.h"
#include "core/contact.h"
#include "core/guard.h"
#include "core/host.h"
#include "core/lobby.h"
#include "core/poller.h"
#include "core/transport.h"

namespace dicomm {

// Who is told what becomes of connections, under the mutex.
class ConnectionEvents {
 public:
  virtual ~ConnectionEvents() = default;

  // What waited for this connection can be sent.
  virtual void peer_connected(int rank, Connection& connection) = 0;
  // What it said of one communicator.
  virtual void peer_said(int rank, const Connection::Word& word) = 0;
  // It closed all communicators: gone() says so.
  virtual void peer_left(int rank) = 0;
  // It died or cannot be reached, which ends every communicator that it is in: gone() says why.
  virtual void peer_failed(int rank) = 0;
};

// Under the mutex, but for what says otherwise.
class ConnectionManager {
 public:
  using Time = std::chrono::steady_clock::time_point;

  ConnectionManager(std::shared_ptr<Store> store, const Options& options, const Identity& me,
                    Guard& guard, Poller& poller, Ledger& ledger, Matcher& matcher,
                    ConnectionEvents& events);

  // Listens, and publishes how this rank is reached. Before any other thread is there.
  void open();
  // Has the connection made, where it is neither there nor being made. Throws Error.
  void need(int rank);

  // Null while there is none; it may have ended. live() is null then, too.
  Connection* connection(int rank) const { return peers_[rank].connection.get(); }
  Connection* live(int rank) const {
    Connection* found = connection(rank);
    return found && !found->ended() ? found : nullptr;
  }
  const std::vector<int>& live_ranks() const { return live_; }
  // Why no request with that rank can succeed any more; empty: one can.
  const std::string& gone(int rank) const { return peers_[rank].gone; }
  // Whether that is no leave in order.
  bool has_died(int rank) const {
    return !gone(rank).empty() && !(connection(rank) && connection(rank)->has_left());
  }
  // From any thread. More ranks than cores: one that waits had better leave its core to the others.
  bool crowded() const { return same_host_peers_ + 1 > cores_; }
  std::string describe(int rank) const;
  // What may explain that a wait for the rank, or for any, was in vain.
  std::string hint(int rank) const;

  // Whatever is done with a connection, or asked of its peer, comes here, or through settle().
  void rouse(Connection& connection) {
    connection.idle_sleeps = 0;
    if (connection.resting) stop_resting(connection);
  }
  // Writes what fits; if that is not all, sees to it that someone writes the rest.
  void settle(Connection& connection);
  // Looks at every connection that does not rest where looking is free, and at the awaited one.
  void turn_all(int awaited_peer);
  // Whether every peer will wake this side, and nothing is left to do.
  bool ready_to_sleep();
  // Whether a piece of a long message was moved since this was asked: more will follow.
  bool copied() { return std::exchange(copied_, false); }
  // was_ready: to sleep, whether it slept or not.
  void woke(bool was_ready);
  void handle(const Poller::Event& event);
  // Cuts off those that hold buffers for too long, too. Returns when to come again.
  Time check_alive();
  // Since when the chip copies messages of peers, who hold their memory until they are told.
  std::optional<Time> chip_copies_since() const;
  bool copies_by_chip() const {
    return std::ranges::any_of(
        awake_, [this](int rank) { return peers_[rank].connection->copies_by_chip(); });
  }
  bool has_chip_copies(std::uint32_t context) const;

  void serve_lobby();
  Time lobby_wakes_at() const { return lobby_.wake_at(); }

  // Ends the connection with a peer that does not let go of a buffer.
  void cut_off_holder(int rank);

  // Says goodbye to every peer, and lets go of all buffers. Nobody is connected from here on.
  void leave_all();
  // Whether all goodbyes are on their way for certain.
  bool handed_over();
  // Without the mutex: waits for the threads that make connections, then ends everything.
  void close();

  // See Communicator. The mutex is neither held nor taken: the caller may hold a chip's allocator,
  // for which a thread with the mutex waits.
  void declare_memory(const MemoryRegion& region);
  void forget_memory(std::uint64_t address, std::uint64_t bytes);
  bool reaches_declared_memory() const;

 private:
  struct Peer {
    std::unique_ptr<Connection> connection;
    std::string gone;
    bool dialling = false;
    std::string address;      // it published, once known
    bool unsealed = false;    // nobody of this job wrote what the store has instead
    std::string turned_away;  // why our last call was in vain
    Fd crossed;  // its own call, kept until ours is through: its end tells it that we died
    bool finished_writing = false;
  };

  // connection_manager.cpp
  void connected(int rank, const PeerIdentity& peer, std::unique_ptr<Stream> stream);
  void turn(Connection& connection);
  void stop_resting(Connection& connection);
  void conclude(Connection& connection, const StreamEnd* end);
  void end_connection(int rank, std::string why);
  void stream_ended(int rank, const StreamEnd& end);
  void cut_off_holders(Time now);

  // connecting.cpp
  void open_transports();
  Transport& transport_of(const PendingConnection& pending);
  void validate(PendingConnection& pending);
  void finish_accepting(const PeerIdentity& peer, std::unique_ptr<Acceptor> acceptor, Fd caller);
  std::string addresses(int rank) const;
  void start_dialler(std::function<void()> body);
  void dialler_ended(std::list<std::thread>::iterator self);
  // connecting.cpp; not under the mutex
  void dial(int rank);
  void dial(int rank, const Contact& contact);
  Dialled call(const Contact& contact, std::size_t transport, int rank, const Deadline& deadline,
               const TransportCard& card, Fd& socket);
  void await_crossed_call(int rank, const Fd& socket);
  void unreachable(int rank, const std::string& reason);
  std::optional<Contact> find_contact(int rank);

  const std::shared_ptr<Store> store_;
  const Options& options_;
  const Identity& me_;
  Guard& guard_;
  Poller& poller_;
  Ledger& ledger_;
  Matcher& matcher_;
  ConnectionEvents& events_;

  std::vector<Peer> peers_;
  std::vector<int> live_;  // ranks of peers with a live connection
  // Those that have to be looked at. The others rest: nothing is left to do, and their peers have
  // been asked to wake this side, so that a wake-up costs as much as there is to do.
  std::vector<int> awake_;

  Contact contact_;
  std::vector<std::unique_ptr<Transport>> transports_;  // in the registry's order, as the next two
  std::vector<std::size_t> doors_;                      // whose listener each one's callers come to
  std::vector<Fd> listeners_;
  Lobby lobby_;

  const int cores_ = usable_cores();
  std::atomic<int> same_host_peers_{0};  // of the connected ranks
  bool copied_ = false;                  // a piece of a long message, since copied() was asked
  Time next_check_{};                    // that peers are alive
  std::atomic<bool> closing_{false};
  std::list<std::thread> diallers_;
  std::list<std::thread> ended_dialler_;  // the last that ended, to be joined
  std::condition_variable no_dialler_left_;
};

}  // namespace dicomm
