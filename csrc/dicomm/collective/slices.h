// An allreduce in which each slice of a vector is shared by ranks of its own: what a mixed-vendor
// allreduce is between vendors, where every vendor has cut the vector into shards of its own.
#pragma once

#include <vector>

#include "collective/collectives.h"

namespace dicomm {

struct Slice {
  void* data;  // on its owners; elsewhere unused
  std::size_t count;
  std::vector<int> owners;  // group ranks, in the order in which they are combined
};

// In place; the slices as listed on every rank, all in flight at once. Each owner reduces its
// part of a slice and sends it to the other owners: one rounding, equal bits on all owners.
// divisor: of avg, the number of vectors that were summed up in all.
std::int64_t allreduce_slices(Group& group, std::span<const Slice> slices, DataType type,
                              ReduceOp op, int divisor, const Call& call);

// The finest common slices of shards: for each of the groups `shards[k]` of ranks, `count` elements
// cut into as many equal shards. count must divide by the size of every group.
struct Range {
  std::size_t begin, count;
  std::vector<int> owners;
};
std::vector<Range> common_slices(std::size_t count, const std::vector<std::vector<int>>& groups);

}  // namespace dicomm
