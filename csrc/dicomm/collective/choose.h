// Collectives among ranks that are equally far from each other: picks the algorithm by the number
// of ranks and bytes. Every rank must see the same numbers. All sends are finished on return.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"

namespace dicomm {

// In place.
std::int64_t flat_allreduce(Exchange& exchange, void* data, std::size_t count, DataType type,
                            ReduceOp op, std::int64_t ready_at_ns);

// output: null but on the root; may be input.
std::int64_t flat_reduce(Exchange& exchange, const void* input, void* output, std::size_t count,
                         DataType type, ReduceOp op, int root, std::int64_t ready_at_ns);

std::int64_t flat_reduce_scatter(Exchange& exchange, std::span<const ConstBlock> inputs,
                                 Block output, DataType type, ReduceOp op,
                                 std::int64_t ready_at_ns);

std::int64_t flat_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                            std::int64_t ready_at_ns);

// own: this rank's block; may be blocks[rank] itself.
std::int64_t flat_allgather(Exchange& exchange, ConstBlock own, std::span<const Block> blocks,
                            std::int64_t ready_at_ns);

}  // namespace dicomm
