#include "collective/halving.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "collective/scratch.h"

namespace dicomm {

namespace {

// The elements of the ranks [first, first + count).
struct RankRange {
  std::size_t begin, length;
  RankRange(std::span<const std::size_t> ends, int first, int count)
      : begin(first == 0 ? 0 : ends[first - 1]), length(ends[first + count - 1] - begin) {}
};

std::int64_t doubling_allgather(Exchange& exchange, std::byte* data,
                                std::span<const std::size_t> ends, std::size_t element_bytes,
                                std::int64_t ready_at_ns) {
  const int rank = exchange.rank();
  std::int64_t arrived = 0;
  for (int half = 1; half < exchange.size(); half *= 2) {
    const RankRange mine(ends, rank / half * half, half);
    const RankRange theirs(ends, (rank ^ half) / half * half, half);
    const auto incoming = exchange.receive(data + theirs.begin * element_bytes,
                                           theirs.length * element_bytes, rank ^ half);
    exchange.send(data + mine.begin * element_bytes, mine.length * element_bytes, rank ^ half,
                  std::max(ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(incoming));
  }
  return arrived;
}

}  // namespace

std::int64_t halving_reduce_scatter(Exchange& exchange, std::byte* partials,
                                    std::span<const std::size_t> ends, const Combine& combine,
                                    std::int64_t ready_at_ns) {
  const int rank = exchange.rank();
  const std::size_t width = combine.element_bytes;
  Scratch scratch(ends.back() * width);
  std::int64_t arrived = 0;
  for (int half = exchange.size() / 2; half >= 1; half /= 2) {
    const int peer = rank ^ half;
    const RankRange kept(ends, rank / half * half, half);
    const RankRange given(ends, peer / half * half, half);
    const auto incoming = exchange.receive(scratch.data(), kept.length * width, peer);
    exchange.send(partials + given.begin * width, given.length * width, peer,
                  std::max(ready_at_ns, arrived));
    arrived = std::max(arrived, exchange.wait(incoming));
    std::byte* const mine = partials + kept.begin * width;
    rank < peer ? combine(mine, scratch.data(), mine, kept.length)
                : combine(scratch.data(), mine, mine, kept.length);
  }
  return arrived;
}

std::int64_t halving_allreduce(Exchange& exchange, std::byte* partials, std::size_t count,
                               const Combine& combine, std::int64_t ready_at_ns) {
  const int rank = exchange.rank();
  const int paired = static_cast<int>(std::bit_floor(static_cast<unsigned>(exchange.size())));
  const std::size_t bytes = count * combine.element_bytes;
  std::int64_t arrived = 0;
  if (rank >= paired) {
    exchange.send(partials, bytes, rank - paired, ready_at_ns);
    exchange.finish();  // the result comes to where the vector was
    arrived = exchange.wait(exchange.receive(partials, bytes, rank - paired));
    return std::max(arrived, exchange.finish());
  }
  const bool has_partner = rank + paired < exchange.size();
  if (has_partner) {
    Scratch theirs(bytes);
    arrived = exchange.wait(exchange.receive(theirs.data(), bytes, rank + paired));
    combine(partials, theirs.data(), partials, count);
  }
  std::vector<int> members(paired);
  std::iota(members.begin(), members.end(), 0);
  Exchange inner(exchange, members);
  std::vector<std::size_t> ends(paired);
  for (int r = 0; r < paired; ++r) ends[r] = count * (r + 1) / paired;
  // What a rank gives away comes back reduced only after its peer read it: no send needs waiting.
  arrived = std::max(arrived, halving_reduce_scatter(inner, partials, ends, combine,
                                                     std::max(ready_at_ns, arrived)));
  arrived = std::max(arrived, doubling_allgather(inner, partials, ends, combine.element_bytes,
                                                 std::max(ready_at_ns, arrived)));
  if (has_partner) exchange.send(partials, bytes, rank + paired, std::max(ready_at_ns, arrived));
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
