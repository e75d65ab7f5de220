#include "collective/bruck.h"

#include <algorithm>
#include <cstring>

#include "collective/scratch.h"

namespace dicomm {

// After each round this rank holds twice as many consecutive ranks' blocks, its own first.
std::int64_t bruck_allgather(Exchange& exchange, std::span<const Block> blocks,
                             std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  std::vector<std::size_t> end{0};  // end[i]: of the first i blocks, counted from this rank's
  for (int i = 0; i < size; ++i) end.push_back(end.back() + blocks[(rank + i) % size].bytes);
  const auto span_bytes = [&](int first, int count) {
    std::size_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += blocks[(first + i) % size].bytes;
    return bytes;
  };
  Scratch scratch(end.back());
  if (blocks[rank].bytes > 0) std::memcpy(scratch.data(), blocks[rank].data, blocks[rank].bytes);
  std::int64_t arrived = 0;
  for (int held = 1; held < size; held *= 2) {
    const int count = std::min(held, size - held);
    const int from = (rank + held) % size;
    const auto incoming =
        exchange.receive(scratch.data() + end[held], span_bytes(from, count), from);
    exchange.send(scratch.data(), end[count], (rank - held + size) % size,
                  std::max(ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(incoming));
  }
  for (int i = 1; i < size; ++i) {
    const Block& block = blocks[(rank + i) % size];
    if (block.bytes > 0) std::memcpy(block.data, scratch.data() + end[i], block.bytes);
  }
  return std::max(arrived, exchange.finish());  // the scratch is what was sent
}

// A block for the rank at distance d travels in the rounds of d's bits.
std::int64_t bruck_alltoall(Exchange& exchange, const void* input, void* output,
                            std::size_t block_bytes, std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  const std::size_t half = (size + 1) / 2 * block_bytes;
  int rounds = 0;
  while ((1 << rounds) < size) ++rounds;
  Scratch scratch(size * block_bytes + (rounds + 1) * half);
  std::byte* const held = scratch.data();  // held[d]: on its way over distance d
  std::byte* const received = held + size * block_bytes;
  std::byte* packed = received + half;  // a buffer a round: it must not change while it leaves
  for (int d = 0; d < size; ++d)
    std::memcpy(held + d * block_bytes,
                static_cast<const std::byte*>(input) + (rank + d) % size * block_bytes,
                block_bytes);
  std::int64_t arrived = 0;
  for (int bit = 1; bit < size; bit *= 2, packed += half) {
    std::size_t bytes = 0;
    for (int d = bit; d < size; ++d)
      if (d & bit) {
        std::memcpy(packed + bytes, held + d * block_bytes, block_bytes);
        bytes += block_bytes;
      }
    const auto incoming = exchange.receive(received, bytes, (rank - bit + size) % size);
    exchange.send(packed, bytes, (rank + bit) % size, std::max(ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(incoming));
    bytes = 0;
    for (int d = bit; d < size; ++d)
      if (d & bit) {
        std::memcpy(held + d * block_bytes, received + bytes, block_bytes);
        bytes += block_bytes;
      }
  }
  for (int d = 0; d < size; ++d)
    std::memcpy(static_cast<std::byte*>(output) + (rank - d + size) % size * block_bytes,
                held + d * block_bytes, block_bytes);
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
