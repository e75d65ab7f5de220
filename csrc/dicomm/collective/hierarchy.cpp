#include "collective/hierarchy.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "collective/choose.h"
#include "collective/chunks.h"
#include "collective/scratch.h"
#include "collective/tree.h"

namespace dicomm {

namespace {

// From here on the bytes that a rank's NIC carries cost more than one more round inside the node.
constexpr std::size_t kSpreadBytes = 64 << 10;

// The two levels as a rank sees them.
struct Levels {
  // Between ranks of equal index, on even nodes.
  Levels(Exchange& exchange, const Nodes& nodes)
      : node(nodes.node_of[exchange.rank()]),
        members(nodes.members[node]),
        inside(exchange, members) {
    std::vector<int> alike;
    for (const auto& ranks : nodes.members) alike.push_back(ranks[inside.rank()]);
    between.emplace(exchange, alike);
  }

  // Between leaders: each node's first rank, but the root for its own node.
  Levels(Exchange& exchange, const Nodes& nodes, int root)
      : node(nodes.node_of[exchange.rank()]),
        members(nodes.members[node]),
        inside(exchange, members) {
    std::vector<int> leaders;
    for (const auto& ranks : nodes.members) leaders.push_back(ranks.front());
    leaders[nodes.node_of[root]] = root;
    leader = static_cast<int>(std::find(members.begin(), members.end(), leaders[node]) -
                              members.begin());
    if (leader == inside.rank()) between.emplace(exchange, leaders);
  }

  int node;
  const std::vector<int>& members;
  Exchange inside;
  int leader = 0;                   // its rank inside
  std::optional<Exchange> between;  // ranks are nodes; none where a leader speaks for this rank
};

std::vector<std::size_t> lengths(std::span<const Block> blocks, const std::vector<int>& members) {
  std::vector<std::size_t> bytes;
  for (const int member : members) bytes.push_back(blocks[member].bytes);
  return bytes;
}

// Through leaders, all blocks packed node by node.
std::int64_t allgather_by_leaders(Exchange& exchange, const Nodes& nodes,
                                  std::span<const Block> blocks, std::int64_t ready_at_ns) {
  Levels levels(exchange, nodes, 0);
  std::size_t total = 0;
  for (const Block& block : blocks) total += block.bytes;
  Scratch scratch(total);
  std::vector<Block> packed;
  std::byte* next = scratch.data();
  for (const auto& members : nodes.members) {
    packed.push_back({next, 0});
    for (const std::size_t bytes : lengths(blocks, members)) packed.back().bytes += bytes;
    next += packed.back().bytes;
  }
  std::int64_t arrived =
      tree_gather(levels.inside, blocks[exchange.rank()].data, packed[levels.node].data,
                  lengths(blocks, levels.members), levels.leader, ready_at_ns);
  if (levels.between)
    arrived = std::max(arrived, flat_allgather(*levels.between, packed[levels.between->rank()],
                                               packed, std::max(ready_at_ns, arrived)));
  arrived = std::max(arrived, flat_broadcast(levels.inside, scratch.data(), total, levels.leader,
                                             std::max(ready_at_ns, arrived)));
  const std::byte* from = scratch.data();
  for (const auto& members : nodes.members)
    for (const int member : members) {
      const Block& block = blocks[member];
      if (member != exchange.rank() && block.bytes > 0) std::memcpy(block.data, from, block.bytes);
      from += block.bytes;
    }
  return arrived;
}

// Each rank gets the blocks of its index from all nodes, then the node's ranks share them.
std::int64_t allgather_by_index(Exchange& exchange, const Nodes& nodes,
                                std::span<const Block> blocks, std::int64_t ready_at_ns) {
  Levels levels(exchange, nodes);
  std::vector<Block> alike;
  for (const auto& members : nodes.members) alike.push_back(blocks[members[levels.inside.rank()]]);
  std::int64_t arrived =
      flat_allgather(*levels.between, alike[levels.between->rank()], alike, ready_at_ns);
  for (const auto& members : nodes.members) {
    std::vector<Block> shared;
    for (const int member : members) shared.push_back(blocks[member]);
    arrived = std::max(arrived, flat_allgather(levels.inside, shared[levels.inside.rank()], shared,
                                               std::max(ready_at_ns, arrived)));
  }
  return arrived;
}

}  // namespace

std::int64_t hierarchical_allreduce(Exchange& exchange, const Nodes& nodes, std::byte* partials,
                                    std::size_t count, const Combine& combine,
                                    std::int64_t ready_at_ns) {
  std::int64_t arrived = 0;
  const auto ready = [&] { return std::max(ready_at_ns, arrived); };
  if (nodes.even && count * combine.element_bytes > kSpreadBytes) {
    Levels levels(exchange, nodes);
    const auto parts = chunks(partials, count, combine.element_bytes, levels.inside.size());
    const Block own = parts[levels.inside.rank()];
    arrived = flat_reduce_scatter(levels.inside, read_only(parts), own, combine.type, combine.op,
                                  ready_at_ns);
    arrived = std::max(arrived,
                       flat_allreduce(*levels.between, own.data, own.bytes / combine.element_bytes,
                                      combine.type, combine.op, ready()));
    return std::max(arrived, flat_allgather(levels.inside, own, parts, ready()));
  }
  Levels levels(exchange, nodes, 0);
  arrived = flat_reduce(levels.inside, partials, levels.between ? partials : nullptr, count,
                        combine.type, combine.op, levels.leader, ready_at_ns);
  if (levels.between)
    arrived = std::max(arrived, flat_allreduce(*levels.between, partials, count, combine.type,
                                               combine.op, ready()));
  return std::max(arrived, flat_broadcast(levels.inside, partials, count * combine.element_bytes,
                                          levels.leader, ready()));
}

std::int64_t hierarchical_reduce(Exchange& exchange, const Nodes& nodes, std::byte* partials,
                                 std::size_t count, const Combine& combine, int root,
                                 std::int64_t ready_at_ns) {
  Levels levels(exchange, nodes, root);
  std::int64_t arrived = flat_reduce(levels.inside, partials, levels.between ? partials : nullptr,
                                     count, combine.type, combine.op, levels.leader, ready_at_ns);
  if (levels.between)
    arrived = std::max(
        arrived,
        flat_reduce(*levels.between, partials, exchange.rank() == root ? partials : nullptr, count,
                    combine.type, combine.op, nodes.node_of[root], std::max(ready_at_ns, arrived)));
  return arrived;
}

// Inside a node, each rank reduces what goes to the ranks of its index on every node.
std::int64_t hierarchical_reduce_scatter(Exchange& exchange, const Nodes& nodes,
                                         std::span<const ConstBlock> inputs, Block output,
                                         DataType type, ReduceOp op, std::int64_t ready_at_ns) {
  Levels levels(exchange, nodes);
  const Combine combine(type, op);
  const auto wide_bytes = [&](int rank) {
    return inputs[rank].bytes / element_bytes(type) * combine.element_bytes;
  };
  std::size_t total = 0;
  for (int rank = 0; rank < exchange.size(); ++rank) total += wide_bytes(rank);
  Scratch scratch(total);
  std::byte* next = scratch.data();
  std::vector<ConstBlock> by_index;  // an index's blocks, of all nodes
  std::vector<ConstBlock> alike;     // of this rank's index, node by node
  for (int index = 0; index < levels.inside.size(); ++index) {
    by_index.push_back({next, 0});
    for (const auto& members : nodes.members) {
      const std::size_t bytes = wide_bytes(members[index]);
      widen(inputs[members[index]].data, next, bytes / combine.element_bytes, type);
      if (index == levels.inside.rank()) alike.push_back({next, bytes});
      by_index.back().bytes += bytes;
      next += bytes;
    }
  }
  const ConstBlock& own = by_index[levels.inside.rank()];
  std::int64_t arrived =
      flat_reduce_scatter(levels.inside, by_index, {const_cast<void*>(own.data), own.bytes},
                          combine.type, combine.op, ready_at_ns);
  const ConstBlock& mine = alike[levels.node];
  arrived = std::max(
      arrived,
      flat_reduce_scatter(*levels.between, alike, {const_cast<void*>(mine.data), mine.bytes},
                          combine.type, combine.op, std::max(ready_at_ns, arrived)));
  narrow(mine.data, output.data, output.bytes / element_bytes(type), type,
         op == ReduceOp::avg ? exchange.size() : 1);
  return arrived;
}

std::int64_t hierarchical_broadcast(Exchange& exchange, const Nodes& nodes, void* data,
                                    std::size_t bytes, int root, std::int64_t ready_at_ns) {
  Levels levels(exchange, nodes, root);
  std::int64_t arrived = 0;
  if (levels.between)
    arrived = flat_broadcast(*levels.between, data, bytes, nodes.node_of[root], ready_at_ns);
  return std::max(arrived, flat_broadcast(levels.inside, data, bytes, levels.leader,
                                          std::max(ready_at_ns, arrived)));
}

std::int64_t hierarchical_allgather(Exchange& exchange, const Nodes& nodes,
                                    std::span<const Block> blocks, std::int64_t ready_at_ns) {
  std::size_t total = 0;
  for (const Block& block : blocks) total += block.bytes;
  const auto algorithm =
      nodes.even && total > kSpreadBytes ? allgather_by_index : allgather_by_leaders;
  return algorithm(exchange, nodes, blocks, ready_at_ns);
}

}  // namespace dicomm
