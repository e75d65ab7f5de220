#include "collective/tree.h"

#include <algorithm>
#include <cstring>

#include "collective/scratch.h"

namespace dicomm {

namespace {

// Ranks numbered from the root. Position p's parent is p without its lowest bit; its subtree is
// the positions [p, p + lowest bit).
struct Place {
  int size, root, position, reach;  // reach: the subtree ends before position + reach

  Place(const Exchange& exchange, int root_rank)
      : size(exchange.size()),
        root(root_rank),
        position((exchange.rank() - root_rank + size) % size),
        reach(1) {
    while (reach < size && (position & reach) == 0) reach *= 2;
  }
  int rank_at(int p) const { return (p + root) % size; }
  bool is_root() const { return position == 0; }
  int parent() const { return rank_at(position - reach); }
};

// Lengths of the blocks in order of position, as ends.
std::vector<std::size_t> ends(const Place& place, std::span<const std::size_t> bytes) {
  std::vector<std::size_t> end{0};
  for (int p = 0; p < place.size; ++p) end.push_back(end.back() + bytes[place.rank_at(p)]);
  return end;
}

}  // namespace

std::int64_t tree_broadcast(Exchange& exchange, void* data, std::size_t bytes, int root,
                            std::int64_t ready_at_ns) {
  const Place place(exchange, root);
  std::int64_t arrived = 0;
  if (!place.is_root()) arrived = exchange.wait(exchange.receive(data, bytes, place.parent()));
  for (int bit = place.reach / 2; bit > 0; bit /= 2)
    if (place.position + bit < place.size)
      exchange.send(data, bytes, place.rank_at(place.position + bit),
                    std::max(ready_at_ns, arrived));
  return std::max(arrived, exchange.finish());
}

std::int64_t tree_reduce(Exchange& exchange, std::byte* partials, std::size_t count,
                         const Combine& combine, int root, std::int64_t ready_at_ns) {
  const Place place(exchange, root);
  const std::size_t bytes = count * combine.element_bytes;
  int children = 0;
  for (int bit = 1; bit < place.reach && place.position + bit < place.size; bit *= 2) ++children;
  Scratch scratch(children * bytes);
  std::vector<Exchange::Incoming> incoming;
  for (int child = 0; child < children; ++child)
    incoming.push_back(exchange.receive(scratch.data() + child * bytes, bytes,
                                        place.rank_at(place.position + (1 << child))));
  std::int64_t arrived = 0;
  for (int child = 0; child < children; ++child) {
    arrived = std::max(arrived, exchange.wait(incoming[child]));
    combine(partials, scratch.data() + child * bytes, partials, count);
  }
  if (!place.is_root())
    exchange.send(partials, bytes, place.parent(), std::max(ready_at_ns, arrived));
  return std::max(arrived, exchange.finish());
}

std::int64_t tree_gather(Exchange& exchange, const void* input, void* output,
                         std::span<const std::size_t> bytes, int root, std::int64_t ready_at_ns) {
  const Place place(exchange, root);
  const auto end = ends(place, bytes);
  const int last = std::min(place.position + place.reach, place.size);
  const std::size_t begin = end[place.position];
  Scratch scratch(end[last] - begin);
  std::vector<Exchange::Incoming> incoming;
  for (int bit = 1; bit < place.reach && place.position + bit < place.size; bit *= 2) {
    const int child = place.position + bit;
    incoming.push_back(exchange.receive(scratch.data() + end[child] - begin,
                                        end[std::min(child + bit, place.size)] - end[child],
                                        place.rank_at(child)));
  }
  const std::size_t own_bytes = end[place.position + 1] - begin;
  if (own_bytes > 0) std::memcpy(scratch.data(), input, own_bytes);
  const std::int64_t arrived = exchange.wait(incoming);
  if (!place.is_root()) {
    exchange.send(scratch.data(), end[last] - begin, place.parent(),
                  std::max(ready_at_ns, arrived));
  } else if (end.back() > 0) {  // positions begin at the root; the output at rank 0
    const std::size_t turn = end[(place.size - root) % place.size];
    std::memcpy(output, scratch.data() + turn, end.back() - turn);
    std::memcpy(static_cast<std::byte*>(output) + end.back() - turn, scratch.data(), turn);
  }
  return std::max(arrived, exchange.finish());
}

std::int64_t tree_scatter(Exchange& exchange, const void* input, void* output,
                          std::span<const std::size_t> bytes, int root, std::int64_t ready_at_ns) {
  const Place place(exchange, root);
  const auto end = ends(place, bytes);
  const int last = std::min(place.position + place.reach, place.size);
  const std::size_t begin = end[place.position];
  Scratch scratch(end[last] - begin);
  std::int64_t arrived = 0;
  if (!place.is_root()) {
    arrived = exchange.wait(exchange.receive(scratch.data(), end[last] - begin, place.parent()));
  } else if (end.back() > 0) {
    const std::size_t turn = end[(place.size - root) % place.size];
    std::memcpy(scratch.data() + turn, input, end.back() - turn);
    std::memcpy(scratch.data(), static_cast<const std::byte*>(input) + end.back() - turn, turn);
  }
  for (int bit = place.reach / 2; bit > 0; bit /= 2) {
    const int child = place.position + bit;
    if (child >= place.size) continue;
    exchange.send(scratch.data() + end[child] - begin,
                  end[std::min(child + bit, place.size)] - end[child], place.rank_at(child),
                  std::max(ready_at_ns, arrived));
  }
  const std::size_t own_bytes = end[place.position + 1] - begin;
  if (own_bytes > 0) std::memcpy(output, scratch.data(), own_bytes);
  return std::max(arrived, exchange.finish());
}

}  // namespace dicomm
