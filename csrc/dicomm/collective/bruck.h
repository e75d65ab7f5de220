// Bruck's algorithms: log2(size) rounds for groups of any size, by forwarding what others sent.
// For short blocks, where the number of messages is what costs.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"

namespace dicomm {

// blocks[rank] is this rank's; the others are filled in. Lengths may differ.
std::int64_t bruck_allgather(Exchange& exchange, std::span<const Block> blocks,
                             std::int64_t ready_at_ns);

// `size` blocks of block_bytes each, in and out. Each byte travels up to log2(size) times.
std::int64_t bruck_alltoall(Exchange& exchange, const void* input, void* output,
                            std::size_t block_bytes, std::int64_t ready_at_ns);

}  // namespace dicomm
