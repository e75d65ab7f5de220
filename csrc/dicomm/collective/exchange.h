// The messages of one collective on one rank: posts them, paces them, waits under one deadline.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "collective/group.h"
#include "collective/request_pool.h"

namespace dicomm {

class Exchange {
 public:
  // A message on its way here; no request where the message is empty: those are never sent.
  struct Incoming {
    RequestState* request = nullptr;  // the exchange's
    std::size_t bytes = 0;
    int peer = -1;
  };

  Exchange(Group& group, const Call& call);
  // A part of the same collective among some of `whole`'s ranks, numbered as listed there. Holds
  // the caller, and must not outlive `whole`.
  Exchange(Exchange& whole, const std::vector<int>& members);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool crowded() const { return group_.crowded(); }

  // Peers are this exchange's ranks; both sides know the length of every message.
  Incoming receive(void* data, std::size_t bytes, int peer);
  // The data must stay until finish(). A rank has one port: on paced links its messages leave
  // one after the other, so that fanning out is not free.
  void send(const void* data, std::size_t bytes, int peer, std::int64_t ready_at_ns);
  // An empty message that is sent, for barriers.
  Incoming receive_signal(int peer);
  void send_signal(int peer, std::int64_t ready_at_ns);

  // Takes in what is there already, without waiting: its senders have their buffers back early.
  static void look_for(std::span<const Incoming> incoming);
  // Waits for the bytes; returns when the last was delivered on the emulated clock (0: unpaced).
  std::int64_t wait(const Incoming& incoming);
  std::int64_t wait(std::span<const Incoming> incoming);
  // Waits until every buffer sent is free, those of the whole collective; returns when the last
  // message left the port.
  std::int64_t finish();

 private:
  struct Port {
    std::int64_t free_at_ns = 0;
    RequestPool requests;
    std::size_t sent = 0;  // of the requests, sends before this one are finished
  };
  Incoming post_receive(void* data, std::size_t bytes, int peer);
  void post_send(const void* data, std::size_t bytes, int communicator_rank,
                 std::int64_t ready_at_ns);
  std::size_t wait(RequestState& request) const;
  int communicator_rank(int peer) const;
  std::chrono::milliseconds time_left() const;

  Group& group_;
  std::uint64_t tag_;
  std::chrono::steady_clock::time_point deadline_;
  int rank_;
  int size_;
  std::vector<int> members_;  // group ranks; empty: all of the group
  Port own_port_;
  Port& port_;
};

}  // namespace dicomm
