// The public calls: checks what was passed, then flat (choose.h) or in levels (hierarchy.h).
#include "collective/collectives.h"

#include <algorithm>
#include <string>

#include "collective/bruck.h"
#include "collective/choose.h"
#include "collective/chunks.h"
#include "collective/doubling.h"
#include "collective/hierarchy.h"
#include "collective/pairwise.h"
#include "collective/tree.h"

namespace dicomm {

namespace {

// Blocks of all ranks together, up to which forwarding beats one message a peer, in groups where
// that is many.
constexpr std::size_t kForwardBytes = 16 << 10;
constexpr int kForwardRanks = 9;

bool is_forwarded(const Group& group, std::size_t block_bytes) {
  return group.size() >= kForwardRanks && block_bytes * group.size() <= kForwardBytes;
}

void expect_own_fits(ConstBlock from, Block to) {
  if (from.bytes != to.bytes)
    throw Error("this rank's own part is " + std::to_string(from.bytes) + " bytes to send and " +
                std::to_string(to.bytes) + " to receive");
}

void expect_one_block_a_rank(std::size_t blocks, const Group& group, const char* what) {
  if (blocks != static_cast<std::size_t>(group.size()))
    throw Error(std::string(what) + ": " + std::to_string(blocks) + " blocks for a group of " +
                std::to_string(group.size()) + " ranks");
}

void expect_member(int root, const Group& group, const char* what) {
  if (root < 0 || root >= group.size())
    throw Error(std::string(what) + ": root " + std::to_string(root) + " is not one of the " +
                std::to_string(group.size()) + " ranks of the group");
}

}  // namespace

std::int64_t allreduce(Group& group, void* data, std::size_t count, DataType type, ReduceOp op,
                       const Call& call) {
  check_reduction(type, op);
  const Nodes& nodes = group.nodes(call);
  Exchange exchange(group, call);
  if (!nodes.hierarchical())
    return flat_allreduce(exchange, data, count, type, op, call.ready_at_ns);
  return on_partials(
      data, data, count, type, op, group.size(), [&](std::byte* partials, const Combine& combine) {
        return hierarchical_allreduce(exchange, nodes, partials, count, combine, call.ready_at_ns);
      });
}

std::int64_t reduce(Group& group, const void* input, void* output, std::size_t count, DataType type,
                    ReduceOp op, int root, const Call& call) {
  check_reduction(type, op);
  expect_member(root, group, "reduce");
  void* kept = group.rank() == root ? output : nullptr;
  const Nodes& nodes = group.nodes(call);
  Exchange exchange(group, call);
  if (!nodes.hierarchical())
    return flat_reduce(exchange, input, kept, count, type, op, root, call.ready_at_ns);
  return on_partials(input, kept, count, type, op, group.size(),
                     [&](std::byte* partials, const Combine& combine) {
                       return hierarchical_reduce(exchange, nodes, partials, count, combine, root,
                                                  call.ready_at_ns);
                     });
}

std::int64_t reduce_scatter(Group& group, std::span<const ConstBlock> inputs, Block output,
                            DataType type, ReduceOp op, const Call& call) {
  check_reduction(type, op);
  expect_one_block_a_rank(inputs.size(), group, "reduce_scatter input");
  if (inputs[group.rank()].bytes != output.bytes)
    throw Error("reduce_scatter: this rank's input is " +
                std::to_string(inputs[group.rank()].bytes) + " bytes, its output " +
                std::to_string(output.bytes));
  const Nodes& nodes = group.nodes(call);
  Exchange exchange(group, call);
  if (nodes.hierarchical() && nodes.even)
    return hierarchical_reduce_scatter(exchange, nodes, inputs, output, type, op, call.ready_at_ns);
  return flat_reduce_scatter(exchange, inputs, output, type, op, call.ready_at_ns);
}

std::int64_t broadcast(Group& group, void* data, std::size_t bytes, int root, const Call& call) {
  expect_member(root, group, "broadcast");
  const Nodes& nodes = group.nodes(call);
  Exchange exchange(group, call);
  if (nodes.hierarchical())
    return hierarchical_broadcast(exchange, nodes, data, bytes, root, call.ready_at_ns);
  return flat_broadcast(exchange, data, bytes, root, call.ready_at_ns);
}

std::int64_t allgather(Group& group, ConstBlock input, std::span<const Block> outputs,
                       const Call& call) {
  expect_one_block_a_rank(outputs.size(), group, "allgather output");
  expect_own_fits(input, outputs[group.rank()]);
  const Nodes& nodes = group.nodes(call);
  Exchange exchange(group, call);
  if (!nodes.hierarchical()) return flat_allgather(exchange, input, outputs, call.ready_at_ns);
  copy_own(input, outputs[group.rank()]);
  return hierarchical_allgather(exchange, nodes, outputs, call.ready_at_ns);
}

std::int64_t gather(Group& group, ConstBlock input, std::span<const Block> outputs, int root,
                    const Call& call) {
  expect_member(root, group, "gather");
  if (group.rank() == root) {
    expect_one_block_a_rank(outputs.size(), group, "gather output");
    expect_own_fits(input, outputs[root]);
  }
  Exchange exchange(group, call);
  const std::int64_t arrived = linear_gather(exchange, input, outputs, root, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t scatter(Group& group, std::span<const ConstBlock> inputs, Block output, int root,
                     const Call& call) {
  expect_member(root, group, "scatter");
  if (group.rank() == root) {
    expect_one_block_a_rank(inputs.size(), group, "scatter input");
    expect_own_fits(inputs[root], output);
  }
  Exchange exchange(group, call);
  const std::int64_t arrived = linear_scatter(exchange, inputs, output, root, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t alltoall(Group& group, std::span<const ConstBlock> inputs,
                      std::span<const Block> outputs, const Call& call) {
  expect_one_block_a_rank(inputs.size(), group, "alltoall input");
  expect_one_block_a_rank(outputs.size(), group, "alltoall output");
  expect_own_fits(inputs[group.rank()], outputs[group.rank()]);
  Exchange exchange(group, call);
  const std::int64_t arrived = pairwise_alltoall(exchange, inputs, outputs, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t gather_even(Group& group, const void* input, void* output, std::size_t block_bytes,
                         int root, const Call& call) {
  expect_member(root, group, "gather");
  if (is_forwarded(group, block_bytes)) {
    Exchange exchange(group, call);
    const std::vector<std::size_t> bytes(group.size(), block_bytes);
    return tree_gather(exchange, input, output, bytes, root, call.ready_at_ns);
  }
  std::vector<Block> outputs;
  if (group.rank() == root) outputs = chunks(output, block_bytes * group.size(), 1, group.size());
  return gather(group, {input, block_bytes}, outputs, root, call);
}

std::int64_t scatter_even(Group& group, const void* input, void* output, std::size_t block_bytes,
                          int root, const Call& call) {
  expect_member(root, group, "scatter");
  if (is_forwarded(group, block_bytes)) {
    Exchange exchange(group, call);
    const std::vector<std::size_t> bytes(group.size(), block_bytes);
    return tree_scatter(exchange, input, output, bytes, root, call.ready_at_ns);
  }
  std::vector<ConstBlock> inputs;
  if (group.rank() == root) inputs = chunks(input, block_bytes * group.size(), 1, group.size());
  return scatter(group, inputs, {output, block_bytes}, root, call);
}

std::int64_t alltoall_even(Group& group, const void* input, void* output, std::size_t block_bytes,
                           const Call& call) {
  if (is_forwarded(group, block_bytes)) {
    Exchange exchange(group, call);
    return bruck_alltoall(exchange, input, output, block_bytes, call.ready_at_ns);
  }
  const std::size_t bytes = block_bytes * group.size();
  return alltoall(group, chunks(input, bytes, 1, group.size()),
                  chunks(output, bytes, 1, group.size()), call);
}

std::int64_t barrier(Group& group, const Call& call) {
  Exchange exchange(group, call);
  return dissemination_barrier(exchange, call.ready_at_ns);
}

}  // namespace dicomm
