// A vector cut into one chunk a rank, as even as whole elements allow.
#pragma once

#include <cstring>
#include <vector>

#include "collective/collectives.h"

namespace dicomm {

inline std::vector<Block> chunks(void* data, std::size_t count, std::size_t element_bytes,
                                 int parts) {
  std::vector<Block> result;
  std::size_t first = 0;
  for (int part = 0; part < parts; ++part) {
    const std::size_t length = count / parts + (static_cast<std::size_t>(part) < count % parts);
    result.push_back(
        {static_cast<std::byte*>(data) + first * element_bytes, length * element_bytes});
    first += length;
  }
  return result;
}

inline std::vector<ConstBlock> read_only(const std::vector<Block>& blocks) {
  return {blocks.begin(), blocks.end()};
}

// This rank's own part, as long on both sides; the two may be the same memory.
inline void copy_own(ConstBlock from, Block to) {
  if (from.bytes > 0 && from.data != to.data) std::memmove(to.data, from.data, from.bytes);
}

}  // namespace dicomm
