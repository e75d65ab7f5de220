// Several collectives in one call: what is short is packed into one vector, so that many small
// tensors cost the messages of one. Long ones go by themselves: packing would cost more.
#pragma once

#include <vector>

#include "collective/collectives.h"

namespace dicomm {

struct Vector {
  void* data;
  std::size_t count;  // elements
};

// In place.
std::int64_t allreduce_coalesced(Group& group, std::span<const Vector> vectors, DataType type,
                                 ReduceOp op, const Call& call);

// One list of blocks a vector, as allgather and reduce_scatter take them.
std::int64_t allgather_coalesced(Group& group, std::span<const ConstBlock> inputs,
                                 std::span<const std::vector<Block>> outputs, const Call& call);
std::int64_t reduce_scatter_coalesced(Group& group, std::span<const std::vector<ConstBlock>> inputs,
                                      std::span<const Block> outputs, DataType type, ReduceOp op,
                                      const Call& call);

}  // namespace dicomm
