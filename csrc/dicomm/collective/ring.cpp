#include "collective/ring.h"

#include <algorithm>

#include "collective/scratch.h"

namespace dicomm {

// Block b starts at rank b + 1 and goes round to rank b, growing.
std::int64_t ring_reduce_scatter(Exchange& exchange, std::span<const Block> blocks,
                                 const Combine& combine, std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  const int right = (rank + 1) % size;
  const int left = (rank - 1 + size) % size;
  std::size_t longest = 0;
  for (const Block& block : blocks) longest = std::max(longest, block.bytes);
  Scratch scratch(longest);
  std::int64_t arrived = 0;
  for (int step = 1; step < size; ++step) {
    const Block& given = blocks[(rank - step + size) % size];
    const Block& taken = blocks[(rank - step - 1 + 2 * size) % size];
    const auto incoming = exchange.receive(scratch.data(), taken.bytes, left);
    exchange.send(given.data, given.bytes, right, std::max(ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(incoming));
    combine(scratch.data(), taken.data, taken.data, taken.bytes / combine.element_bytes);
  }
  return arrived;
}

std::int64_t ring_allgather(Exchange& exchange, std::span<const Block> blocks,
                            std::int64_t ready_at_ns) {
  const int size = exchange.size();
  const int rank = exchange.rank();
  const int left = (rank - 1 + size) % size;
  std::vector<Exchange::Incoming> incoming;
  for (int step = 1; step < size; ++step) {
    const Block& block = blocks[(rank - step + size) % size];
    incoming.push_back(exchange.receive(block.data, block.bytes, left));
  }
  std::int64_t arrived = 0;
  for (int step = 1; step < size; ++step) {
    const Block& block = blocks[(rank - step + 1 + size) % size];
    exchange.send(block.data, block.bytes, (rank + 1) % size, std::max(ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(incoming[step - 1]));
  }
  return arrived;
}

}  // namespace dicomm
