// Steps that collectives which reduce share with those that only move bytes.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"

namespace dicomm {

// Each returns the moment the last message this rank needs is delivered (0: unpaced).
std::int64_t allgather_blocks(Exchange& exchange, std::span<const Block> blocks,
                              std::int64_t ready_at_ns);
std::int64_t gather_blocks(Exchange& exchange, ConstBlock input, std::span<const Block> outputs,
                           int root, std::int64_t ready_at_ns);

}  // namespace dicomm
