// Recursive halving: each round two ranks split what is left between them. log2(size) messages
// carry each byte about once.
#pragma once

#include "collective/exchange.h"
#include "collective/partial.h"

namespace dicomm {

// For sizes that are a power of two. In place: of ends[size - 1] elements, rank r's share
// [ends[r - 1], ends[r]) becomes the total of its share; the rest is used up.
std::int64_t halving_reduce_scatter(Exchange& exchange, std::byte* partials,
                                    std::span<const std::size_t> ends, const Combine& combine,
                                    std::int64_t ready_at_ns);

// Rabenseifner's: a halving reduce-scatter, then the same way back. In place, equal bits on every
// rank. Ranks past the last power of two give and get whole vectors.
std::int64_t halving_allreduce(Exchange& exchange, std::byte* partials, std::size_t count,
                               const Combine& combine, std::int64_t ready_at_ns);

}  // namespace dicomm
