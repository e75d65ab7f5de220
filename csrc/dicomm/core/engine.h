// The Communicator itself: its parts, and how they begin and end together. One mutex guards all of
// them; one thread at a time moves bytes.
//
//   Requests           what callers asked for, and how it ends
//   ConnectionManager  the connections with the peers
//   ProgressDriver     who moves bytes when: callers that wait, or else a thread of its own
#pragma once

#include <memory>

#include "core/communicator.h"
#include "core/connection_manager.h"
#include "core/fork.h"
#include "core/guard.h"
#include "core/handshake.h"
#include "core/poller.h"
#include "core/progress_driver.h"
#include "core/requests.h"

namespace dicomm {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(std::shared_ptr<Store> store, const Options& options);
  ~Engine() { close(); }
  // One that lives, whoever holds it, until its process ends where that is a forked child: nothing
  // in there can be destroyed without the threads that the child lacks.
  static std::shared_ptr<Engine> create(std::shared_ptr<Store> store, const Options& options);
  void start();
  void close();

  // False in a child that was forked from the process that made it.
  bool is_here() const { return origin_.is_here(); }
  void require_here() const;  // throws Error

  const Options& options() const { return options_; }
  Requests& requests() { return requests_; }
  ConnectionManager& connections() { return connections_; }
  ProgressDriver& progress() { return progress_; }

 private:
  const Options options_;
  const Identity me_;
  const Origin origin_;
  const int pid_;

  Guard guard_;
  bool closed_ = false;
  Poller poller_;
  Requests requests_;
  ConnectionManager connections_;
  ProgressDriver progress_;
};

}  // namespace dicomm
