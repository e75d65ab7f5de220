#include "collective/choose.h"

#include <algorithm>
#include <bit>

#include "collective/bruck.h"
#include "collective/chunks.h"
#include "collective/doubling.h"
#include "collective/halving.h"
#include "collective/pairwise.h"
#include "collective/ring.h"
#include "collective/total_bytes.h"
#include "collective/tree.h"

namespace dicomm {

namespace {

// Up to this many ranks everyone may well talk to everyone.
constexpr int kFewRanks = 8;

// Reductions of whole vectors. Up to kDirectBytes among few ranks, one round trip costs more than
// sending the vector to everyone; up to kDoublingBytes among many, more than sending it log2(size)
// times; up to kHalvingBytes the number of messages still counts.
constexpr std::size_t kDirectBytes = 16 << 10;
// Where ranks share cores they cannot work side by side anyway; the fewest messages win.
constexpr std::size_t kCrowdedReduceBytes = 64 << 10;
constexpr std::size_t kDoublingBytes = 16 << 10;
constexpr std::size_t kHalvingBytes = 512 << 10;

constexpr std::size_t kTreeReduceBytes = 64 << 10;
constexpr std::size_t kTreeBroadcastBytes = 64 << 10;
constexpr int kTreeBroadcastRanks = 3;         // no tree is deeper than dealing out and collecting
constexpr std::size_t kBruckBytes = 64 << 10;  // of all blocks together

bool is_direct(int size, std::size_t bytes) { return size <= kFewRanks && bytes <= kDirectBytes; }

// The root deals out one chunk a rank, then all exchange chunks: each port carries the data twice
// instead of log2(size) times.
std::int64_t chunked_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                               std::int64_t ready_at_ns) {
  const auto parts = chunks(data, bytes, 1, exchange.size());
  const std::int64_t dealt =
      linear_scatter(exchange, read_only(parts), parts[exchange.rank()], root, ready_at_ns);
  return flat_allgather(exchange, parts[exchange.rank()], parts, std::max(ready_at_ns, dealt));
}

// Each rank's chunk is reduced there, then all exchange chunks.
std::int64_t chunked_allreduce(Exchange& exchange, void* data, std::size_t count, DataType type,
                               ReduceOp op, std::int64_t ready_at_ns) {
  const auto parts = chunks(data, count, element_bytes(type), exchange.size());
  // A chunk that was sent is overwritten with its total, which exists only once it was read.
  const std::int64_t reduced = pairwise_reduce_scatter(
      exchange, read_only(parts), parts[exchange.rank()], type, op, ready_at_ns);
  const std::int64_t arrived =
      pairwise_allgather(exchange, parts[exchange.rank()], parts, std::max(ready_at_ns, reduced));
  return std::max(arrived, exchange.finish());
}

std::int64_t ring_allreduce(Exchange& exchange, std::byte* partials, std::size_t count,
                            const Combine& combine, std::int64_t ready_at_ns) {
  const auto parts = chunks(partials, count, combine.element_bytes, exchange.size());
  const std::int64_t reduced = ring_reduce_scatter(exchange, parts, combine, ready_at_ns);
  const std::int64_t arrived = ring_allgather(exchange, parts, std::max(ready_at_ns, reduced));
  return std::max(arrived, exchange.finish());
}

// As partial results: the whole vector copied once, halved until one block a rank is left.
std::int64_t packed_reduce_scatter(Exchange& exchange, std::span<const ConstBlock> inputs,
                                   Block output, DataType type, ReduceOp op,
                                   std::int64_t ready_at_ns) {
  const Combine combine(type, op);
  std::vector<std::size_t> ends;
  for (const ConstBlock& input : inputs)
    ends.push_back((ends.empty() ? 0 : ends.back()) + input.bytes / element_bytes(type));
  Scratch partials(ends.back() * combine.element_bytes);
  std::size_t begin = 0;
  for (std::size_t r = 0; r < inputs.size(); begin = ends[r++])
    widen(inputs[r].data, partials.data() + begin * combine.element_bytes, ends[r] - begin, type);
  const std::int64_t arrived =
      halving_reduce_scatter(exchange, partials.data(), ends, combine, ready_at_ns);
  const std::int64_t left = exchange.finish();
  const std::size_t count = output.bytes / element_bytes(type);
  narrow(partials.data() + (ends[exchange.rank()] - count) * combine.element_bytes, output.data,
         count, type, op == ReduceOp::avg ? exchange.size() : 1);
  return std::max(arrived, left);
}

}  // namespace

std::int64_t flat_allreduce(Exchange& exchange, void* data, std::size_t count, DataType type,
                            ReduceOp op, std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const std::size_t bytes = count * element_bytes(type);
  if (size == 1 || count == 0) return 0;
  if (is_direct(size, bytes))
    return direct_allreduce(exchange, data, data, count, type, op, ready_at_ns);
  // Passing float32 partials of 16-bit floats round a ring would double its bytes.
  const bool rings = accumulator(type) == type;
  if (size <= kFewRanks || (bytes > kHalvingBytes && !rings))
    return chunked_allreduce(exchange, data, count, type, op, ready_at_ns);
  const auto algorithm = bytes <= kDoublingBytes  ? doubling_allreduce
                         : bytes <= kHalvingBytes ? halving_allreduce
                                                  : ring_allreduce;
  return on_partials(data, data, count, type, op, size,
                     [&](std::byte* partials, const Combine& combine) {
                       return algorithm(exchange, partials, count, combine, ready_at_ns);
                     });
}

std::int64_t flat_reduce(Exchange& exchange, const void* input, void* output, std::size_t count,
                         DataType type, ReduceOp op, int root, std::int64_t ready_at_ns) {
  const std::size_t bytes = count * element_bytes(type);
  const std::size_t direct_bytes = exchange.crowded() ? kCrowdedReduceBytes : kDirectBytes;
  if (exchange.size() <= kFewRanks && bytes <= direct_bytes) {
    const std::int64_t arrived =
        direct_reduce(exchange, input, output, count, type, op, root, ready_at_ns);
    return std::max(arrived, exchange.finish());
  }
  if (exchange.size() > kFewRanks && bytes <= kTreeReduceBytes)
    return on_partials(input, output, count, type, op, exchange.size(),
                       [&](std::byte* partials, const Combine& combine) {
                         return tree_reduce(exchange, partials, count, combine, root, ready_at_ns);
                       });
  const auto inputs = chunks(input, count, element_bytes(type), exchange.size());
  Scratch scratch(inputs[exchange.rank()].bytes);
  const Block own{scratch.data(), inputs[exchange.rank()].bytes};
  const std::int64_t reduced =
      pairwise_reduce_scatter(exchange, inputs, own, type, op, ready_at_ns);
  std::vector<Block> outputs;
  if (output) outputs = chunks(output, count, element_bytes(type), exchange.size());
  const std::int64_t arrived =
      linear_gather(exchange, own, outputs, root, std::max(ready_at_ns, reduced));
  return std::max(arrived, exchange.finish());
}

std::int64_t flat_reduce_scatter(Exchange& exchange, std::span<const ConstBlock> inputs,
                                 Block output, DataType type, ReduceOp op,
                                 std::int64_t ready_at_ns) {
  const bool power_of_two = std::has_single_bit(static_cast<unsigned>(exchange.size()));
  const std::int64_t arrived =
      exchange.size() > kFewRanks && power_of_two && total_bytes(inputs) <= kHalvingBytes
          ? packed_reduce_scatter(exchange, inputs, output, type, op, ready_at_ns)
          : pairwise_reduce_scatter(exchange, inputs, output, type, op, ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t flat_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                            std::int64_t ready_at_ns) {
  const bool tree = exchange.size() <= kTreeBroadcastRanks || bytes <= kTreeBroadcastBytes;
  const auto algorithm = tree ? tree_broadcast : chunked_broadcast;
  const std::int64_t arrived = algorithm(exchange, data, bytes, root, ready_at_ns);
  return std::max(arrived, exchange.finish());
}

std::int64_t flat_allgather(Exchange& exchange, ConstBlock own, std::span<const Block> blocks,
                            std::int64_t ready_at_ns) {
  std::int64_t arrived = 0;
  if (exchange.size() <= kFewRanks) {
    arrived = pairwise_allgather(exchange, own, blocks, ready_at_ns);
  } else {
    copy_own(own, blocks[exchange.rank()]);
    const auto algorithm = total_bytes(blocks) <= kBruckBytes ? bruck_allgather : ring_allgather;
    arrived = algorithm(exchange, blocks, ready_at_ns);
  }
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
