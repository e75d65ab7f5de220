// Recursive doubling: after k rounds, groups of 2^k ranks have each other's data.
#pragma once

#include "collective/exchange.h"
#include "collective/partial.h"

namespace dicomm {

// In place, equal bits on every rank. log2(size) messages of the whole vector from each rank; where
// the size is no power of two, two more for the ranks past it: they give their vector to a partner
// first and get the result back last.
std::int64_t doubling_allreduce(Exchange& exchange, std::byte* partials, std::size_t count,
                                const Combine& combine, std::int64_t ready_at_ns);

// Dissemination, for any size: after k rounds every rank has heard from the 2^k before it.
std::int64_t dissemination_barrier(Exchange& exchange, std::int64_t ready_at_ns);

}  // namespace dicomm
