// Pairwise exchange: every rank sends each other rank what is its, all at once. One round, and a
// reduction combines all ranks' elements at one place: in rank order, rounded once.
//
// What a rank keeps for itself is copied while the messages are on their way.
//
// Each returns the moment the last message this rank needs is delivered (0: unpaced), with sends
// perhaps still in flight: finish() the exchange before touching what was sent.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"

namespace dicomm {

// Everyone sends the whole vector to everyone. Finishes its sends.
std::int64_t direct_allreduce(Exchange& exchange, const void* input, void* output,
                              std::size_t count, DataType type, ReduceOp op,
                              std::int64_t ready_at_ns);

// Everyone sends the whole vector to the root. output: on the root only.
std::int64_t direct_reduce(Exchange& exchange, const void* input, void* output, std::size_t count,
                           DataType type, ReduceOp op, int root, std::int64_t ready_at_ns);

// inputs[r] goes to rank r, which reduces what it gets into output, segment by segment: while one
// is reduced the next is on its way. output may be inputs[rank].
std::int64_t pairwise_reduce_scatter(Exchange& exchange, std::span<const ConstBlock> inputs,
                                     Block output, DataType type, ReduceOp op,
                                     std::int64_t ready_at_ns);

// own: this rank's block, which is sent from there; may be blocks[rank] itself.
std::int64_t pairwise_allgather(Exchange& exchange, ConstBlock own, std::span<const Block> blocks,
                                std::int64_t ready_at_ns);

// blocks[r] goes to or comes from rank r.
std::int64_t linear_gather(Exchange& exchange, ConstBlock input, std::span<const Block> blocks,
                           int root, std::int64_t ready_at_ns);
std::int64_t linear_scatter(Exchange& exchange, std::span<const ConstBlock> blocks, Block output,
                            int root, std::int64_t ready_at_ns);

std::int64_t pairwise_alltoall(Exchange& exchange, std::span<const ConstBlock> inputs,
                               std::span<const Block> outputs, std::int64_t ready_at_ns);

}  // namespace dicomm
