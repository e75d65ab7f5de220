// Bytes on their way from one core to another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dicomm {

// Moves lines just written from this core's own cache to the one that all cores share: the reader
// gets them there in three quarters of the time. Where ranks take turns on a core it doubles the
// time: the reader runs where the lines were. Processors without the instruction skip it.
inline void hand_over(const std::byte* lines, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t at = 0; at < bytes; at += kLineBytes)
    asm volatile("cldemote %0" ::"m"(lines[at]));
#else
  static_cast<void>(lines), static_cast<void>(bytes);
#endif
}

// Fetches what another core wrote, all lines at once, before they are read one after the other.
// More than a few thousand bytes the processor fetches ahead by itself.
inline void fetch(const std::byte* lines, std::size_t bytes) {
  constexpr std::size_t kLineBytes = 64, kMostBytes = 4 << 10;
  for (std::size_t at = 0; at < std::min(bytes, kMostBytes); at += kLineBytes)
    __builtin_prefetch(lines + at);
}

// As memcpy, but for headers and the shortest messages without a call.
inline void copy(void* to, const void* from, std::size_t bytes) {
  const auto ends = [&]<class Word>(Word first, Word last) {  // they may overlap
    std::memcpy(&first, from, sizeof first);
    std::memcpy(&last, static_cast<const std::byte*>(from) + bytes - sizeof last, sizeof last);
    std::memcpy(to, &first, sizeof first);
    std::memcpy(static_cast<std::byte*>(to) + bytes - sizeof last, &last, sizeof last);
  };
  struct Words {
    std::uint64_t word[2];
  };
  if (bytes >= sizeof(Words) && bytes <= 2 * sizeof(Words))
    ends(Words(), Words());
  else if (bytes >= sizeof(std::uint64_t) && bytes < sizeof(Words))
    ends(std::uint64_t(), std::uint64_t());
  else
    std::memcpy(to, from, bytes);
}

}  // namespace dicomm
