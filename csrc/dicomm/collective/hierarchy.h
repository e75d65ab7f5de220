// Collectives over several nodes in levels: inside each node, between nodes, inside again. What
// crosses between nodes crosses once a node instead of once a rank.
//
// Where every node has as many ranks, long vectors cross between ranks of equal index, so that
// every rank's NIC carries its part; else one leader a node speaks for it.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/partial.h"

namespace dicomm {

// In place, equal bits on every rank.
std::int64_t hierarchical_allreduce(Exchange& exchange, const Nodes& nodes, std::byte* partials,
                                    std::size_t count, const Combine& combine,
                                    std::int64_t ready_at_ns);

// In place; the root's partials become everyone's, the others' are used up.
std::int64_t hierarchical_reduce(Exchange& exchange, const Nodes& nodes, std::byte* partials,
                                 std::size_t count, const Combine& combine, int root,
                                 std::int64_t ready_at_ns);

// For even nodes.
std::int64_t hierarchical_reduce_scatter(Exchange& exchange, const Nodes& nodes,
                                         std::span<const ConstBlock> inputs, Block output,
                                         DataType type, ReduceOp op, std::int64_t ready_at_ns);

std::int64_t hierarchical_broadcast(Exchange& exchange, const Nodes& nodes, void* data,
                                    std::size_t bytes, int root, std::int64_t ready_at_ns);

// blocks[rank] is this rank's; the others are filled in.
std::int64_t hierarchical_allgather(Exchange& exchange, const Nodes& nodes,
                                    std::span<const Block> blocks, std::int64_t ready_at_ns);

}  // namespace dicomm
