// The ranks that take part in a collective, in the order that numbers them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/communicator.h"

namespace dicomm {

// One collective: the same tag on every rank, the caller's clock, and its timeout.
struct Call {
  std::uint64_t tag;
  std::int64_t ready_at_ns = 0;  // when the input is ready on an emulated chip's clock (0: now)
  std::chrono::milliseconds timeout{300'000};  // for the whole collective
};

// Which ranks of a group share a node. Equal on every rank.
struct Nodes {
  std::vector<std::vector<int>> members;  // group ranks by node; nodes by their first rank
  std::vector<int> node_of;               // by group rank
  bool even = true;                       // as many ranks on every node
  bool crowded = false;                   // more ranks than cores on some node

  int count() const { return static_cast<int>(members.size()); }
  // Whether there are levels: several nodes, and one of several ranks.
  bool hierarchical() const { return count() > 1 && members.size() < node_of.size(); }
};

class Group {
 public:
  // ranks: communicator ranks in group order, empty for all of them; must hold the caller's.
  // id: tells several groups on one communicator apart, the same on every member.
  // node: the name of the node this process is on; empty: this host's.
  explicit Group(std::shared_ptr<Communicator> communicator, std::vector<int> ranks = {},
                 std::uint16_t id = 0, std::string node = "");

  int rank() const { return rank_; }  // this process, numbered within the group
  int size() const { return static_cast<int>(ranks_.size()); }
  int communicator_rank(int rank) const { return ranks_.at(rank); }
  Communicator& communicator() const { return *communicator_; }

  // The tag of the next collective. Every member takes its tags in the same order, so each
  // collective has its own and two in flight cannot mix. Tags with the top bit set are the
  // collectives'; point-to-point messages use the others.
  std::uint64_t next_tag();

  // The members tell each other their nodes the first time, as part of their first collective.
  const Nodes& nodes(const Call& call);
  // As those say, once they are known.
  bool crowded() const { return nodes_known_.load(std::memory_order_acquire) && nodes_->crowded; }

 private:
  Nodes exchange_nodes(const Call& call);

  std::shared_ptr<Communicator> communicator_;
  std::vector<int> ranks_;
  int rank_ = -1;
  std::uint64_t first_tag_;
  std::string node_;
  std::atomic<std::uint64_t> issued_{0};
  std::mutex nodes_mutex_;
  std::optional<Nodes> nodes_;
  std::atomic<bool> nodes_known_{false};  // spares later collectives the mutex
};

}  // namespace dicomm
