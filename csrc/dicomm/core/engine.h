// What the communicators of a process share: the first one makes it, and those of some of its ranks
// add neither threads nor connections. One mutex guards all of it; one thread at a time moves
// bytes.
//
//   Requests           of each communicator: what callers asked for, and how it ends
//   ConnectionManager  the connections with the peers
//   ProgressDriver     who moves bytes when: callers that wait, or else a thread of its own
//
// A frame on a connection, a message that waits and a request name their communicator by its
// context: a number that is the same on all of its ranks, and 0 for the first one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/chip_queue.h"
#include "core/communicator.h"
#include "core/connection_manager.h"
#include "core/fork.h"
#include "core/guard.h"
#include "core/handshake.h"
#include "core/matching.h"
#include "core/poller.h"
#include "core/progress_driver.h"
#include "core/request.h"

namespace dicomm {

class Requests;

class Engine final : public ConnectionEvents {
 public:
  Engine(std::shared_ptr<Store> store, const Options& options);
  ~Engine() { end(); }
  // One that lives, whoever holds it, until its process ends where that is a forked child: nothing
  // in there can be destroyed without the threads that the child lacks.
  static std::shared_ptr<Engine> create(std::shared_ptr<Store> store, const Options& options);
  void start();

  // False in a child that was forked from the process that made it.
  bool is_here() const { return origin_.is_here(); }
  void require_here() const;  // throws Error

  // Whether its connections are those that a communicator with these options would make; what these
  // leave open about this rank is as here.
  bool serves(const Options& options) const;
  // With that filled in.
  Options completed(Options options) const;
  // For a communicator of those ranks whose first one this is; 0: it cannot share these
  // connections, as they are closed, a rank is gone for them, or this rank has made as many as it
  // can.
  std::uint32_t new_context(const std::vector<int>& ranks);

  // Under the mutex: the communicator hears of its peers until it is closed. Throws Error.
  void open(Requests& requests);
  // The last one to be closed ends everything, in order. Idempotent.
  void close(Requests& requests);

  const Identity& me() const { return me_; }
  Guard& guard() { return guard_; }
  Poller& poller() { return poller_; }
  Ledger& ledger() { return ledger_; }
  Matcher& matcher() { return matcher_; }
  ChipQueue& chip_queue() { return chip_queue_; }
  ConnectionManager& connections() { return connections_; }
  ProgressDriver& progress() { return progress_; }

 private:
  void close_one(Lock& lock, Requests& requests);
  void close_last(Lock& lock);
  void end();

  void peer_connected(int rank, Connection& connection) override;
  void peer_said(int rank, const Connection::Word& word) override;
  void peer_left(int rank) override;
  void peer_failed(int rank) override;
  void finish_doomed(int rank);

  const Options options_;
  const Identity me_;
  const Origin origin_;
  const int pid_;

  Guard guard_;
  bool closed_ = false, ended_ = false;
  std::map<std::uint32_t, Requests*> open_;  // by context
  std::uint32_t contexts_ = 0;               // that new_context() made
  Poller poller_;
  Ledger ledger_;
  Matcher matcher_;
  ChipQueue chip_queue_;
  ConnectionManager connections_;
  ProgressDriver progress_;
};

}  // namespace dicomm
