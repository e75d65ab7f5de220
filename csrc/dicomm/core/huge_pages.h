// Large memory in pages of 2 MiB instead of 4 KiB: a copy of tens of MiB takes half the time.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace dicomm {

// Asks the kernel for them, where the memory has room for some. Not yet written to: what is there
// already stays in small pages.
inline void prefer_huge_pages(void* memory, std::size_t bytes) {
  constexpr std::uintptr_t kPageBytes = 4 << 10, kHugePageBytes = 2 << 20;
  if (bytes < 2 * kHugePageBytes) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t first = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uintptr_t end = (begin + bytes) / kPageBytes * kPageBytes;
  ::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace dicomm
