#include "collective/doubling.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace dicomm {

std::int64_t doubling_allreduce(Exchange& exchange, std::byte* partials, std::size_t count,
                                const Combine& combine, std::int64_t ready_at_ns) {
  const int rank = exchange.rank();
  const int paired = static_cast<int>(std::bit_floor(static_cast<unsigned>(exchange.size())));
  const std::size_t bytes = count * combine.element_bytes;
  // A buffer a round, because a vector being sent must not change, and one to receive.
  const int rounds = std::bit_width(static_cast<unsigned>(paired)) + 1;
  Scratch scratch((rounds + 1) * bytes);
  std::byte* const theirs = scratch.data();
  std::byte* next = theirs + bytes;
  const std::byte* current = partials;
  std::int64_t arrived = 0;
  const auto send = [&](int peer) {
    exchange.send(current, bytes, peer, std::max(ready_at_ns, arrived));
  };
  const auto receive = [&](int peer) {
    arrived = std::max(arrived, exchange.wait(exchange.receive(theirs, bytes, peer)));
  };
  const auto take_in = [&](int peer) {
    receive(peer);
    rank < peer ? combine(current, theirs, next, count) : combine(theirs, current, next, count);
    current = next;
    next += bytes;
  };
  if (rank >= paired) {
    send(rank - paired);
    receive(rank - paired);
    current = theirs;
  } else {
    const bool has_partner = rank + paired < exchange.size();
    if (has_partner) take_in(rank + paired);
    for (int bit = 1; bit < paired; bit *= 2) {
      send(rank ^ bit);
      take_in(rank ^ bit);
    }
    if (has_partner) send(rank + paired);
  }
  const std::int64_t left = exchange.finish();
  if (bytes > 0 && current != partials) std::memcpy(partials, current, bytes);
  return std::max(arrived, left);
}

std::int64_t dissemination_barrier(Exchange& exchange, std::int64_t ready_at_ns) {
  const int size = exchange.size();
  std::int64_t arrived = 0;
  for (int distance = 1; distance < size; distance *= 2) {
    exchange.send_signal((exchange.rank() + distance) % size, std::max(ready_at_ns, arrived));
    const auto signal = exchange.receive_signal((exchange.rank() - distance + size) % size);
    arrived = std::max(arrived, exchange.wait(signal));
  }
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
