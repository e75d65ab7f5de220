#include "collective/slices.h"

#include <algorithm>

#include "collective/chunks.h"
#include "collective/exchange.h"
#include "collective/partial.h"
#include "collective/scratch.h"

namespace dicomm {

namespace {

// This rank's share of the work on one slice.
struct Share {
  std::vector<Block> parts;  // by owner
  int place;                 // of this rank among the owners
  const std::vector<int>& owners;
  std::byte* received;  // copies of own part, by owner
};

}  // namespace

std::int64_t allreduce_slices(Group& group, std::span<const Slice> slices, DataType type,
                              ReduceOp op, int divisor, const Call& call) {
  check_reduction(type, op);
  const Combine combine(type, op);
  const std::size_t width = element_bytes(type);
  std::vector<Share> shares;
  std::size_t received_bytes = 0;
  for (const Slice& slice : slices) {
    const auto own = std::find(slice.owners.begin(), slice.owners.end(), group.rank());
    if (own == slice.owners.end()) continue;
    const int place = static_cast<int>(own - slice.owners.begin());
    const int owners = static_cast<int>(slice.owners.size());
    shares.push_back(
        {chunks(slice.data, slice.count, width, owners), place, slice.owners, nullptr});
    received_bytes += shares.back().parts[place].bytes * owners;
  }
  Scratch scratch(received_bytes);
  Exchange exchange(group, call);
  std::byte* next = scratch.data();
  std::vector<std::vector<Exchange::Incoming>> parts(shares.size());
  for (std::size_t s = 0; s < shares.size(); ++s) {
    Share& share = shares[s];
    share.received = next;
    const std::size_t own_bytes = share.parts[share.place].bytes;
    for (std::size_t owner = 0; owner < share.owners.size(); ++owner, next += own_bytes)
      if (share.owners[owner] != group.rank())
        parts[s].push_back(exchange.receive(next, own_bytes, share.owners[owner]));
  }
  for (const Share& share : shares)
    for (std::size_t owner = 0; owner < share.owners.size(); ++owner)
      if (share.owners[owner] != group.rank())
        exchange.send(share.parts[owner].data, share.parts[owner].bytes, share.owners[owner],
                      call.ready_at_ns);
  // A part that was sent is overwritten with its total, which exists only once it was read.
  std::vector<Exchange::Incoming> totals;
  for (const Share& share : shares)
    for (std::size_t owner = 0; owner < share.owners.size(); ++owner)
      if (share.owners[owner] != group.rank())
        totals.push_back(exchange.receive(share.parts[owner].data, share.parts[owner].bytes,
                                          share.owners[owner]));
  std::int64_t arrived = 0;
  for (std::size_t s = 0; s < shares.size(); ++s) {
    const Share& share = shares[s];
    const Block own = share.parts[share.place];
    const std::size_t count = own.bytes / width;
    arrived = std::max(arrived, exchange.wait(parts[s]));
    std::vector<const void*> sources;
    for (std::size_t owner = 0; owner < share.owners.size(); ++owner)
      sources.push_back(share.owners[owner] == group.rank() ? own.data
                                                            : share.received + owner * own.bytes);
    reduce_divided(sources, own.data, count, type, combine.op, op == ReduceOp::avg ? divisor : 1);
    for (const int owner : share.owners)
      if (owner != group.rank())
        exchange.send(own.data, own.bytes, owner, std::max(call.ready_at_ns, arrived));
  }
  arrived = std::max(arrived, exchange.wait(totals));
  return std::max(arrived, exchange.finish());
}

std::vector<Range> common_slices(std::size_t count, const std::vector<std::vector<int>>& groups) {
  std::vector<std::size_t> ends;
  for (const auto& group : groups)
    for (std::size_t shard = 1; shard <= group.size(); ++shard)
      ends.push_back(count / group.size() * shard);
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  std::vector<Range> slices;
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    slices.push_back({begin, end - begin, {}});
    for (const auto& group : groups)
      slices.back().owners.push_back(group[begin / (count / group.size())]);
    begin = end;
  }
  return slices;
}

}  // namespace dicomm
