// Collectives over raw host-accessible memory.
//
// Every member of the group calls the same collective with a Call of the same tag. Sizes may
// differ between ranks where blocks are given, and may be 0, but sender and receiver must agree
// on them. Each call blocks until this rank's part is done and returns done_at_ns: when that is
// so on the emulated clock, every message carrying its sender's clock; 0 if no link is paced.
//
// choose.cpp picks the algorithm by size; over several nodes hierarchy.cpp works in levels.
// Reductions: every rank ends with the same bits. 16-bit floats are added up in float32 and rounded
// once, whatever the algorithm. Groups of up to 8 ranks on one node combine in rank order; larger
// ones along a tree, a ring or in levels.
//
// Errors: TimeoutError past call.timeout, PeerError when a member dies or aborts, Error where
// sizes disagree or a type has no such reduction. After an error the group's ranks may disagree
// on what was done: abort the communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "collective/group.h"
#include "collective/reduction.h"

namespace dicomm {

struct ConstBlock {
  const void* data;
  std::size_t bytes;
};
struct Block {
  void* data;
  std::size_t bytes;

  operator ConstBlock() const { return {data, bytes}; }
};

// In place.
std::int64_t allreduce(Group& group, void* data, std::size_t count, DataType type, ReduceOp op,
                       const Call& call);

// output: written on the root only; may be input.
std::int64_t reduce(Group& group, const void* input, void* output, std::size_t count, DataType type,
                    ReduceOp op, int root, const Call& call);

// inputs[r] goes to rank r; output, as long as inputs[rank], may be inputs[rank] itself.
std::int64_t reduce_scatter(Group& group, std::span<const ConstBlock> inputs, Block output,
                            DataType type, ReduceOp op, const Call& call);

std::int64_t broadcast(Group& group, void* data, std::size_t bytes, int root, const Call& call);

// outputs[r] comes from rank r; input may be outputs[rank] itself.
std::int64_t allgather(Group& group, ConstBlock input, std::span<const Block> outputs,
                       const Call& call);

// outputs: on the root only.
std::int64_t gather(Group& group, ConstBlock input, std::span<const Block> outputs, int root,
                    const Call& call);

// inputs: on the root only.
std::int64_t scatter(Group& group, std::span<const ConstBlock> inputs, Block output, int root,
                     const Call& call);

// inputs[r] goes to rank r, outputs[r] comes from rank r.
std::int64_t alltoall(Group& group, std::span<const ConstBlock> inputs,
                      std::span<const Block> outputs, const Call& call);

// The same where every block is block_bytes long, on all ranks: then short ones are forwarded in
// fewer messages. Buffers hold one block a rank, in rank order; where marked, on the root only.
std::int64_t gather_even(Group& group, const void* input, void* output /*root*/,
                         std::size_t block_bytes, int root, const Call& call);
std::int64_t scatter_even(Group& group, const void* input /*root*/, void* output,
                          std::size_t block_bytes, int root, const Call& call);
std::int64_t alltoall_even(Group& group, const void* input, void* output, std::size_t block_bytes,
                           const Call& call);

std::int64_t barrier(Group& group, const Call& call);

}  // namespace dicomm
