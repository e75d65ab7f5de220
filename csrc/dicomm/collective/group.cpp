#include "collective/group.h"

#include <cstring>
#include <map>
#include <numeric>

#include "collective/bruck.h"
#include "collective/chunks.h"
#include "collective/exchange.h"
#include "core/host.h"
#include "core/sha256.h"

namespace dicomm {

namespace {

constexpr std::uint64_t kCollectiveTag = 1ULL << 63;
constexpr int kGroupIdShift = 47;  // 16 bits of group, 47 bits of operation
constexpr std::uint64_t kOperationMask = (1ULL << kGroupIdShift) - 1;
constexpr std::uint64_t kNodesOperation = kOperationMask;  // never reached by counting
constexpr int kFewestWithLevels = 3;                       // two ranks have one link anyway

}  // namespace

Group::Group(std::shared_ptr<Communicator> communicator, std::vector<int> ranks, std::uint16_t id,
             std::string node)
    : communicator_(std::move(communicator)),
      ranks_(std::move(ranks)),
      first_tag_(kCollectiveTag | (static_cast<std::uint64_t>(id) << kGroupIdShift)),
      node_(node.empty() ? host_id() : std::move(node)) {
  const int world_size = communicator_->world_size();
  if (ranks_.empty()) {
    ranks_.resize(world_size);
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  std::vector<bool> named(world_size);
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0 || ranks_[i] >= world_size)
      throw Error("group: rank " + std::to_string(ranks_[i]) + " is not one of the " +
                  std::to_string(world_size) + " ranks of the communicator");
    if (named[ranks_[i]])
      throw Error("group: rank " + std::to_string(ranks_[i]) + " is named twice");
    named[ranks_[i]] = true;
    if (ranks_[i] == communicator_->rank()) rank_ = static_cast<int>(i);
  }
  if (rank_ < 0)
    throw Error("group: this process, rank " + std::to_string(communicator_->rank()) +
                ", is not a member");
}

std::uint64_t Group::next_tag() { return first_tag_ | (issued_.fetch_add(1) & kOperationMask); }

const Nodes& Group::nodes(const Call& call) {
  if (nodes_known_.load(std::memory_order_acquire)) return *nodes_;
  std::lock_guard lock(nodes_mutex_);
  if (!nodes_) nodes_ = exchange_nodes(call);
  nodes_known_.store(true, std::memory_order_release);
  return *nodes_;
}

Nodes Group::exchange_nodes(const Call& call) {
  struct Card {
    std::uint64_t node, cores;
  };
  std::vector<Card> cards(size(), Card());
  if (size() >= kFewestWithLevels) {
    const Digest digest = sha256(node_);
    std::memcpy(&cards[rank_].node, digest.data(), sizeof cards[rank_].node);
    cards[rank_].cores = usable_cores();
    Exchange exchange(*this, {first_tag_ | kNodesOperation, 0, call.timeout});
    bruck_allgather(exchange, chunks(cards.data(), cards.size(), sizeof cards[0], size()), 0);
    exchange.finish();
  }
  Nodes nodes;
  std::map<std::uint64_t, int> numbers;
  for (int rank = 0; rank < size(); ++rank) {
    const int node = numbers.emplace(cards[rank].node, nodes.count()).first->second;
    if (node == nodes.count()) nodes.members.emplace_back();
    nodes.members[node].push_back(rank);
    nodes.node_of.push_back(node);
  }
  for (const auto& members : nodes.members) {
    nodes.even &= members.size() == nodes.members.front().size();
    for (const int member : members)
      nodes.crowded |= size() >= kFewestWithLevels && members.size() > cards[member].cores;
  }
  return nodes;
}

}  // namespace dicomm
