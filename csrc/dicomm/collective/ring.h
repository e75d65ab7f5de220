// Rings: every rank sends to its right and receives from its left only; each byte passes a link
// once. For long vectors in large groups, where everyone sending to everyone would crowd the net.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/partial.h"

namespace dicomm {

// In place: blocks[rank] of the partials becomes the total of that block; the rest is used up.
std::int64_t ring_reduce_scatter(Exchange& exchange, std::span<const Block> blocks,
                                 const Combine& combine, std::int64_t ready_at_ns);

// blocks[rank] is this rank's; the others are filled in.
std::int64_t ring_allgather(Exchange& exchange, std::span<const Block> blocks,
                            std::int64_t ready_at_ns);

}  // namespace dicomm
