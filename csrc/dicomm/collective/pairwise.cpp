#include "collective/pairwise.h"

#include <algorithm>
#include <vector>

#include "collective/chunks.h"
#include "collective/scratch.h"

namespace dicomm {

namespace {

// Short enough that a segment is reduced from the cache it was received into; a multiple of every
// element size.
constexpr std::size_t kSegmentBytes = 128 << 10;
// Up to here the messages of several segments cost more than that saves.
constexpr std::size_t kOneSegmentBytes = 512 << 10;

}  // namespace

std::int64_t direct_allreduce(Exchange& exchange, const void* input, void* output,
                              std::size_t count, DataType type, ReduceOp op,
                              std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  const std::size_t bytes = count * element_bytes(type);
  Scratch scratch(size * bytes);
  std::vector<const void*> sources(size);
  std::vector<Exchange::Incoming> incoming;
  incoming.reserve(size);
  for (int peer = 0; peer < size; ++peer) sources[peer] = scratch.data() + peer * bytes;
  for (int step = 1; step < size; ++step)
    exchange.send(input, bytes, (rank + step) % size, ready_at_ns);
  for (int step = 1; step < size; ++step) {
    const int peer = (rank - step + size) % size;
    incoming.push_back(exchange.receive(scratch.data() + peer * bytes, bytes, peer));
  }
  const std::int64_t arrived = exchange.wait(incoming);
  const std::int64_t left = exchange.finish();  // the output may be the input being sent
  sources[rank] = input;
  reduce(sources, output, count, type, op);
  return std::max(arrived, left);
}

std::int64_t direct_reduce(Exchange& exchange, const void* input, void* output, std::size_t count,
                           DataType type, ReduceOp op, int root, std::int64_t ready_at_ns) {
  const std::size_t bytes = count * element_bytes(type);
  if (exchange.rank() != root) {
    exchange.send(input, bytes, root, ready_at_ns);
    return 0;
  }
  Scratch scratch(exchange.size() * bytes);
  std::vector<const void*> sources(exchange.size());
  std::vector<Exchange::Incoming> incoming;
  incoming.reserve(exchange.size());
  for (int peer = 0; peer < exchange.size(); ++peer) {
    std::byte* slot = scratch.data() + peer * bytes;
    sources[peer] = peer == root ? input : slot;
    if (peer != root) incoming.push_back(exchange.receive(slot, bytes, peer));
  }
  const std::int64_t arrived = exchange.wait(incoming);
  reduce(sources, output, count, type, op);
  return arrived;
}

std::int64_t pairwise_reduce_scatter(Exchange& exchange, std::span<const ConstBlock> inputs,
                                     Block output, DataType type, ReduceOp op,
                                     std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  std::size_t longest = 0;
  for (const ConstBlock& input : inputs) longest = std::max(longest, input.bytes);
  const std::size_t most = longest <= kOneSegmentBytes ? kOneSegmentBytes : kSegmentBytes;
  const auto segment_length = [most](std::size_t bytes, std::size_t begin) {
    return begin < bytes ? std::min(most, bytes - begin) : 0;
  };
  const std::size_t slot_bytes = segment_length(output.bytes, 0);
  Scratch scratch(2 * size * slot_bytes);
  const auto slot = [&](int parity, int peer) {
    return scratch.data() + (parity * size + peer) * slot_bytes;
  };
  std::vector<Exchange::Incoming> incoming[2];
  const auto post = [&](std::size_t begin, int parity) {
    incoming[parity].clear();
    incoming[parity].reserve(size);
    for (int step = 1; step < size; ++step) {
      const int peer = (rank - step + size) % size;
      incoming[parity].push_back(
          exchange.receive(slot(parity, peer), segment_length(output.bytes, begin), peer));
    }
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      exchange.send(static_cast<const std::byte*>(inputs[peer].data) + begin,
                    segment_length(inputs[peer].bytes, begin), peer, ready_at_ns);
    }
  };
  std::int64_t arrived = 0;
  std::vector<const void*> sources(size);
  post(0, 0);
  for (std::size_t begin = 0, parity = 0; begin < longest; begin += most, parity ^= 1) {
    if (begin + most < longest) post(begin + most, parity ^ 1);
    arrived = std::max(arrived, exchange.wait(incoming[parity]));
    for (int peer = 0; peer < size; ++peer) sources[peer] = slot(parity, peer);
    sources[rank] = static_cast<const std::byte*>(inputs[rank].data) + begin;
    reduce(sources, static_cast<std::byte*>(output.data) + begin,
           segment_length(output.bytes, begin) / element_bytes(type), type, op);
  }
  return arrived;
}

std::int64_t pairwise_allgather(Exchange& exchange, ConstBlock own, std::span<const Block> blocks,
                                std::int64_t ready_at_ns) {
  const int size = exchange.size();
  std::vector<Exchange::Incoming> incoming;
  incoming.reserve(size);
  for (int step = 1; step < size; ++step) {
    const int peer = (exchange.rank() - step + size) % size;
    incoming.push_back(exchange.receive(blocks[peer].data, blocks[peer].bytes, peer));
  }
  for (int step = 1; step < size; ++step)
    exchange.send(own.data, own.bytes, (exchange.rank() + step) % size, ready_at_ns);
  exchange.look_for(incoming);
  copy_own(own, blocks[exchange.rank()]);
  return exchange.wait(incoming);
}

std::int64_t linear_gather(Exchange& exchange, ConstBlock input, std::span<const Block> blocks,
                           int root, std::int64_t ready_at_ns) {
  if (exchange.rank() != root) {
    exchange.send(input.data, input.bytes, root, ready_at_ns);
    return 0;
  }
  std::vector<Exchange::Incoming> incoming;
  incoming.reserve(exchange.size());
  for (int peer = 0; peer < exchange.size(); ++peer)
    if (peer != root)
      incoming.push_back(exchange.receive(blocks[peer].data, blocks[peer].bytes, peer));
  exchange.look_for(incoming);
  copy_own(input, blocks[root]);
  return exchange.wait(incoming);
}

std::int64_t linear_scatter(Exchange& exchange, std::span<const ConstBlock> blocks, Block output,
                            int root, std::int64_t ready_at_ns) {
  if (exchange.rank() != root)
    return exchange.wait(exchange.receive(output.data, output.bytes, root));
  for (int step = 1; step < exchange.size(); ++step) {
    const int peer = (root + step) % exchange.size();
    exchange.send(blocks[peer].data, blocks[peer].bytes, peer, ready_at_ns);
  }
  copy_own(blocks[root], output);
  return 0;
}

std::int64_t pairwise_alltoall(Exchange& exchange, std::span<const ConstBlock> inputs,
                               std::span<const Block> outputs, std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  std::vector<Exchange::Incoming> incoming;
  incoming.reserve(size);
  for (int step = 1; step < size; ++step) {
    const int peer = (rank - step + size) % size;
    incoming.push_back(exchange.receive(outputs[peer].data, outputs[peer].bytes, peer));
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    exchange.send(inputs[peer].data, inputs[peer].bytes, peer, ready_at_ns);
  }
  exchange.look_for(incoming);
  copy_own(inputs[rank], outputs[rank]);
  return exchange.wait(incoming);
}

}  // namespace dicomm
