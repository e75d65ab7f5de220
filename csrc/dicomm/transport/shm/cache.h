// What is about to be read on another core.
#pragma once

#include <cstddef>

namespace dicomm {

// Moves lines just written from this core's own cache to the one that all cores share: the reader
// gets them there in three quarters of the time. Processors without the instruction skip it.
inline void hand_over(const std::byte* lines, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t at = 0; at < bytes; at += kLineBytes)
    asm volatile("cldemote %0" ::"m"(lines[at]));
#else
  static_cast<void>(lines), static_cast<void>(bytes);
#endif
}

}  // namespace dicomm
