// A vector cut into one chunk a rank, as even as whole elements allow.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "collective/collectives.h"

namespace dicomm {

// Byte: const where Piece is a ConstBlock.
template <class Piece, class Byte>
std::vector<Piece> cut(Byte* data, std::size_t count, std::size_t element_bytes, int parts) {
  std::vector<Piece> result;
  result.reserve(parts);
  const std::size_t length = count / parts, longer = count % parts;
  for (int part = 0; part < parts; ++part) {
    const std::size_t bytes = (length + (static_cast<std::size_t>(part) < longer)) * element_bytes;
    result.push_back({data, bytes});
    data += bytes;
  }
  return result;
}

inline std::vector<Block> chunks(void* data, std::size_t count, std::size_t element_bytes,
                                 int parts) {
  return cut<Block>(static_cast<std::byte*>(data), count, element_bytes, parts);
}

inline std::vector<ConstBlock> chunks(const void* data, std::size_t count,
                                      std::size_t element_bytes, int parts) {
  return cut<ConstBlock>(static_cast<const std::byte*>(data), count, element_bytes, parts);
}

inline std::vector<ConstBlock> read_only(const std::vector<Block>& blocks) {
  return {blocks.begin(), blocks.end()};
}

// This rank's own part, as long on both sides; the two may be the same memory.
inline void copy_own(ConstBlock from, Block to) {
  if (from.bytes > 0 && from.data != to.data) std::memmove(to.data, from.data, from.bytes);
}

}  // namespace dicomm
