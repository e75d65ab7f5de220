// How many bytes the blocks of a collective hold together.
#pragma once

#include <cstddef>

namespace dicomm {

std::size_t total_bytes(const auto& blocks) {
  std::size_t total = 0;
  for (const auto& block : blocks) total += block.bytes;
  return total;
}

}  // namespace dicomm
