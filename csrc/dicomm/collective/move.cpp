// Collectives that move bytes without looking at them.
#include "collective/move.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective/chunks.h"

namespace dicomm {

namespace {

constexpr std::size_t kTreeBroadcastBytes = 64 << 10;

void copy_own(ConstBlock from, Block to) {
  if (from.bytes != to.bytes)
    throw Error("this rank's own part is " + std::to_string(from.bytes) + " bytes to send and " +
                std::to_string(to.bytes) + " to receive");
  if (from.bytes > 0 && from.data != to.data) std::memmove(to.data, from.data, from.bytes);
}

void expect_one_block_a_rank(std::size_t blocks, int size, const char* what) {
  if (blocks != static_cast<std::size_t>(size))
    throw Error(std::string(what) + ": " + std::to_string(blocks) + " blocks for a group of " +
                std::to_string(size) + " ranks");
}

// Binomial tree: each round doubles the ranks that hold the data.
std::int64_t tree_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                            std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int position = (exchange.rank() - root + size) % size;
  const auto rank_at = [&](int p) { return (p + root) % size; };
  std::int64_t arrived = 0;
  int bit = 1;
  for (; bit < size; bit <<= 1) {
    if (position & bit) {
      arrived = exchange.wait(exchange.receive(data, bytes, rank_at(position - bit)));
      ready_at_ns = std::max(ready_at_ns, arrived);
      break;
    }
  }
  for (bit >>= 1; bit > 0; bit >>= 1)
    if (position + bit < size) exchange.send(data, bytes, rank_at(position + bit), ready_at_ns);
  return arrived;
}

// The root deals out one chunk a rank, then all exchange chunks: each port carries the data twice
// instead of log2(size) times.
std::int64_t chunked_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                               std::int64_t ready_at_ns) {
  const auto parts = chunks(data, bytes, 1, exchange.size());
  if (exchange.rank() != root) {
    const Block& own = parts[exchange.rank()];
    ready_at_ns = std::max(ready_at_ns, exchange.wait(exchange.receive(own.data, own.bytes, root)));
  } else {
    for (int step = 1; step < exchange.size(); ++step) {
      const int peer = (root + step) % exchange.size();
      exchange.send(parts[peer].data, parts[peer].bytes, peer, ready_at_ns);
    }
  }
  return allgather_blocks(exchange, parts, ready_at_ns);
}

}  // namespace

std::int64_t allgather_blocks(Exchange& exchange, std::span<const Block> blocks,
                              std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const Block own = blocks[exchange.rank()];
  std::vector<Exchange::Incoming> incoming;
  for (int step = 1; step < size; ++step) {
    const int peer = (exchange.rank() - step + size) % size;
    incoming.push_back(exchange.receive(blocks[peer].data, blocks[peer].bytes, peer));
  }
  for (int step = 1; step < size; ++step)
    exchange.send(own.data, own.bytes, (exchange.rank() + step) % size, ready_at_ns);
  return exchange.wait(incoming);
}

std::int64_t gather_blocks(Exchange& exchange, ConstBlock input, std::span<const Block> outputs,
                           int root, std::int64_t ready_at_ns) {
  if (exchange.rank() != root) {
    exchange.send(input.data, input.bytes, root, ready_at_ns);
    return 0;
  }
  std::vector<Exchange::Incoming> incoming;
  for (int peer = 0; peer < exchange.size(); ++peer)
    if (peer != root)
      incoming.push_back(exchange.receive(outputs[peer].data, outputs[peer].bytes, peer));
  copy_own(input, outputs[root]);
  return exchange.wait(incoming);
}

std::int64_t broadcast(Group& group, void* data, std::size_t bytes, int root, const Call& call) {
  Exchange exchange(group, call);
  const bool small = group.size() < 4 || bytes <= kTreeBroadcastBytes;
  const auto algorithm = small ? tree_broadcast : chunked_broadcast;
  const std::int64_t arrived = algorithm(exchange, data, bytes, root, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t allgather(Group& group, ConstBlock input, std::span<const Block> outputs,
                       const Call& call) {
  expect_one_block_a_rank(outputs.size(), group.size(), "allgather");
  copy_own(input, outputs[group.rank()]);
  Exchange exchange(group, call);
  const std::int64_t arrived = allgather_blocks(exchange, outputs, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t gather(Group& group, ConstBlock input, std::span<const Block> outputs, int root,
                    const Call& call) {
  if (group.rank() == root) expect_one_block_a_rank(outputs.size(), group.size(), "gather");
  Exchange exchange(group, call);
  const std::int64_t arrived = gather_blocks(exchange, input, outputs, root, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t scatter(Group& group, std::span<const ConstBlock> inputs, Block output, int root,
                     const Call& call) {
  Exchange exchange(group, call);
  if (group.rank() != root) {
    const auto incoming = exchange.receive(output.data, output.bytes, root);
    return exchange.wait(incoming);
  }
  expect_one_block_a_rank(inputs.size(), group.size(), "scatter");
  copy_own(inputs[root], output);
  for (int step = 1; step < group.size(); ++step) {
    const int peer = (root + step) % group.size();
    exchange.send(inputs[peer].data, inputs[peer].bytes, peer, call.ready_at_ns);
  }
  return exchange.finish();
}

std::int64_t alltoall(Group& group, std::span<const ConstBlock> inputs,
                      std::span<const Block> outputs, const Call& call) {
  expect_one_block_a_rank(inputs.size(), group.size(), "alltoall input");
  expect_one_block_a_rank(outputs.size(), group.size(), "alltoall output");
  const int size = group.size();
  Exchange exchange(group, call);
  std::vector<Exchange::Incoming> incoming;
  for (int step = 1; step < size; ++step) {
    const int peer = (group.rank() - step + size) % size;
    incoming.push_back(exchange.receive(outputs[peer].data, outputs[peer].bytes, peer));
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (group.rank() + step) % size;
    exchange.send(inputs[peer].data, inputs[peer].bytes, peer, call.ready_at_ns);
  }
  copy_own(inputs[group.rank()], outputs[group.rank()]);
  const std::int64_t arrived = exchange.wait(incoming);
  return std::max(arrived, exchange.finish());
}

// Dissemination: after round k every rank has heard from the 2^k before it.
std::int64_t barrier(Group& group, const Call& call) {
  const int size = group.size();
  Exchange exchange(group, call);
  std::int64_t arrived = 0;
  for (int distance = 1; distance < size; distance <<= 1) {
    const auto signal = exchange.receive_signal((group.rank() - distance + size) % size);
    exchange.send_signal((group.rank() + distance) % size, std::max(call.ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(signal));
  }
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
