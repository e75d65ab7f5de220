// Collectives that combine the elements of several ranks.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "collective/chunks.h"
#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/move.h"
#include "collective/scratch.h"

namespace dicomm {

namespace {

// Up to here one round trip costs more than sending the whole vector to everyone.
constexpr std::size_t kDirectBytes = 16 << 10;
constexpr std::size_t kDirectPairBytes = 64 << 10;
constexpr int kDirectRanks = 8;
// While one segment is reduced the next is on its way. A multiple of every element size.
constexpr std::size_t kSegmentBytes = 512 << 10;

bool is_short(int size, std::size_t bytes) {
  return bytes <= (size == 2 ? kDirectPairBytes : kDirectBytes);
}

std::size_t segment_length(std::size_t bytes, std::size_t begin) {
  return begin < bytes ? std::min(kSegmentBytes, bytes - begin) : 0;
}

// Every rank receives its chunk from all the others, segment by segment, and reduces it in rank
// order: one rounding for 16-bit floats, the bytes of a ring, and one step of latency.
std::int64_t reduce_own_chunk(Exchange& exchange, std::span<const ConstBlock> inputs, Block output,
                              DataType type, ReduceOp op, std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  std::size_t longest = 0;
  for (const ConstBlock& input : inputs) longest = std::max(longest, input.bytes);
  const std::size_t slot_bytes = segment_length(output.bytes, 0);
  Scratch scratch(2 * size * slot_bytes);
  const auto slot = [&](int parity, int peer) {
    return scratch.data() + (parity * size + peer) * slot_bytes;
  };
  std::vector<Exchange::Incoming> incoming[2];
  const auto post = [&](std::size_t begin, int parity) {
    incoming[parity].clear();
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
  for (std::size_t begin = 0, parity = 0; begin < longest; begin += kSegmentBytes, parity ^= 1) {
    if (begin + kSegmentBytes < longest) post(begin + kSegmentBytes, parity ^ 1);
    arrived = std::max(arrived, exchange.wait(incoming[parity]));
    for (int peer = 0; peer < size; ++peer) sources[peer] = slot(parity, peer);
    sources[rank] = static_cast<const std::byte*>(inputs[rank].data) + begin;
    reduce(sources, static_cast<std::byte*>(output.data) + begin,
           segment_length(output.bytes, begin) / element_bytes(type), type, op);
  }
  return arrived;
}

// Everyone sends everything to everyone, and reduces in rank order.
std::int64_t direct_allreduce(Exchange& exchange, const void* input, void* output,
                              std::size_t count, DataType type, ReduceOp op,
                              std::int64_t ready_at_ns) {
  const std::size_t bytes = count * element_bytes(type);
  Scratch scratch(exchange.size() * bytes);
  std::vector<Exchange::Incoming> incoming;
  std::vector<const void*> sources(exchange.size(), input);
  for (int peer = 0; peer < exchange.size(); ++peer) {
    if (peer == exchange.rank()) continue;
    sources[peer] = scratch.data() + peer * bytes;
    incoming.push_back(exchange.receive(scratch.data() + peer * bytes, bytes, peer));
  }
  for (int step = 1; step < exchange.size(); ++step)
    exchange.send(input, bytes, (exchange.rank() + step) % exchange.size(), ready_at_ns);
  const std::int64_t arrived = exchange.wait(incoming);
  const std::int64_t left = exchange.finish();  // the output may be the input being sent
  if (output) reduce(sources, output, count, type, op);
  return std::max(arrived, left);
}

// Recursive doubling: log2(size) peers. Ranks past the last power of two give their vector to a
// partner first and get the result back last. Both sides of an exchange combine (lower, upper).
std::int64_t doubling_allreduce(Exchange& exchange, const void* input, void* output,
                                std::size_t count, DataType type, ReduceOp op,
                                std::int64_t ready_at_ns) {
  const int rank = exchange.rank();
  const int paired = static_cast<int>(std::bit_floor(static_cast<unsigned>(exchange.size())));
  const DataType wide = accumulator(type);
  const ReduceOp step_op = op == ReduceOp::avg ? ReduceOp::sum : op;
  const std::size_t bytes = count * element_bytes(wide);
  // One buffer a step: a vector being sent must not change under the transport.
  const int steps = std::bit_width(static_cast<unsigned>(paired)) + 1;
  Scratch scratch((2 * steps + 1) * bytes);
  std::byte* partial = scratch.data();
  widen(input, partial, count, type);
  std::int64_t arrived = 0;
  const auto receive = [&](int peer) {
    std::byte* theirs = partial + bytes;
    arrived = std::max(arrived, exchange.wait(exchange.receive(theirs, bytes, peer)));
    ready_at_ns = std::max(ready_at_ns, arrived);
    return theirs;
  };
  const auto combine = [&](const std::byte* theirs, int peer) {
    const void* sources[] = {rank < peer ? partial : theirs, rank < peer ? theirs : partial};
    reduce(sources, partial + 2 * bytes, count, type == DataType::boolean ? type : wide, step_op);
    partial += 2 * bytes;
  };
  if (rank >= paired) {
    exchange.send(partial, bytes, rank - paired, ready_at_ns);
    partial = receive(rank - paired);
  } else {
    const bool has_partner = rank + paired < exchange.size();
    if (has_partner) combine(receive(rank + paired), rank + paired);
    for (int bit = 1; bit < paired; bit <<= 1) {
      const int peer = rank ^ bit;
      exchange.send(partial, bytes, peer, ready_at_ns);
      combine(receive(peer), peer);
    }
    if (has_partner) exchange.send(partial, bytes, rank + paired, ready_at_ns);
  }
  const std::int64_t left = exchange.finish();
  if (output) narrow(partial, output, count, type, op == ReduceOp::avg ? exchange.size() : 1);
  return std::max(arrived, left);
}

// output null: this rank takes part and keeps nothing.
std::int64_t short_allreduce(Exchange& exchange, const void* input, void* output, std::size_t count,
                             DataType type, ReduceOp op, std::int64_t ready_at_ns) {
  const auto algorithm = exchange.size() <= kDirectRanks ? direct_allreduce : doubling_allreduce;
  return algorithm(exchange, input, output, count, type, op, ready_at_ns);
}

}  // namespace

std::int64_t allreduce(Group& group, void* data, std::size_t count, DataType type, ReduceOp op,
                       const Call& call) {
  check_reduction(type, op);
  Exchange exchange(group, call);
  if (is_short(group.size(), count * element_bytes(type)))
    return short_allreduce(exchange, data, data, count, type, op, call.ready_at_ns);
  const auto parts = chunks(data, count, element_bytes(type), group.size());
  const std::int64_t reduced =
      reduce_own_chunk(exchange, read_only(parts), parts[group.rank()], type, op, call.ready_at_ns);
  const std::int64_t arrived =
      allgather_blocks(exchange, parts, std::max(call.ready_at_ns, reduced));
  return std::max(arrived, exchange.finish());
}

std::int64_t reduce(Group& group, const void* input, void* output, std::size_t count, DataType type,
                    ReduceOp op, int root, const Call& call) {
  check_reduction(type, op);
  void* kept = group.rank() == root ? output : nullptr;
  const std::size_t bytes = count * element_bytes(type);
  if (is_short(group.size(), bytes)) {
    Exchange exchange(group, call);
    return short_allreduce(exchange, input, kept, count, type, op, call.ready_at_ns);
  }
  const auto inputs =
      read_only(chunks(const_cast<void*>(input), count, element_bytes(type), group.size()));
  Scratch scratch(inputs[group.rank()].bytes);
  const Block own{scratch.data(), inputs[group.rank()].bytes};
  Exchange exchange(group, call);
  const std::int64_t reduced = reduce_own_chunk(exchange, inputs, own, type, op, call.ready_at_ns);
  std::vector<Block> outputs;
  if (kept) outputs = chunks(kept, count, element_bytes(type), group.size());
  const std::int64_t arrived = gather_blocks(exchange, {own.data, own.bytes}, outputs, root,
                                             std::max(call.ready_at_ns, reduced));
  return std::max(arrived, exchange.finish());
}

std::int64_t reduce_scatter(Group& group, std::span<const ConstBlock> inputs, Block output,
                            DataType type, ReduceOp op, const Call& call) {
  check_reduction(type, op);
  if (inputs.size() != static_cast<std::size_t>(group.size()) ||
      inputs[group.rank()].bytes != output.bytes)
    throw Error("reduce_scatter: one input a rank, this rank's as long as its output, expected");
  Exchange exchange(group, call);
  const std::int64_t arrived =
      reduce_own_chunk(exchange, inputs, output, type, op, call.ready_at_ns);
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
