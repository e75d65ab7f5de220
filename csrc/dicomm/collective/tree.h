// Binomial trees: log2(size) rounds, size - 1 messages.
#pragma once

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/partial.h"

namespace dicomm {

std::int64_t tree_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                            std::int64_t ready_at_ns);

// In place; the root's partials become everyone's, the others' are used up.
std::int64_t tree_reduce(Exchange& exchange, std::byte* partials, std::size_t count,
                         const Combine& combine, int root, std::int64_t ready_at_ns);

// bytes[r]: the length of rank r's block, known to all. output: on the root, the blocks in order of
// rank. Blocks are packed on the way.
std::int64_t tree_gather(Exchange& exchange, const void* input, void* output,
                         std::span<const std::size_t> bytes, int root, std::int64_t ready_at_ns);
std::int64_t tree_scatter(Exchange& exchange, const void* input, void* output,
                          std::span<const std::size_t> bytes, int root, std::int64_t ready_at_ns);

}  // namespace dicomm
