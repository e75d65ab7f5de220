// One direction of a shared segment: a ring of bytes with one writer and one reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dicomm {

struct Ring {
  static constexpr std::size_t kBytes = 256 << 10;  // a power of two

  alignas(64) std::atomic<std::uint64_t> written;
  std::atomic<std::uint32_t> reader_asleep;
  alignas(64) std::atomic<std::uint64_t> consumed;
  std::atomic<std::uint32_t> writer_asleep;
  // How the reader finds out whether it may read the writer's memory.
  alignas(64) std::atomic<std::uint64_t> probe_address;
  std::atomic<std::uint64_t> probe_value;
  std::atomic<std::uint32_t> withdrawn;  // the writer's memory is no longer to be read
  alignas(64) std::byte data[kBytes];

  // The counters are the peer's to write too: never trust a difference beyond the ring.
  static std::size_t bounded(std::uint64_t difference) {
    return std::min<std::uint64_t>(difference, kBytes);
  }

  void put(std::uint64_t at, const void* source, std::size_t bytes) {
    const std::size_t first = std::min(bytes, kBytes - at % kBytes);
    std::memcpy(data + at % kBytes, source, first);
    std::memcpy(data, static_cast<const std::byte*>(source) + first, bytes - first);
  }

  void take(std::uint64_t at, void* target, std::size_t bytes) const {
    const std::size_t first = std::min(bytes, kBytes - at % kBytes);
    std::memcpy(target, data + at % kBytes, first);
    std::memcpy(static_cast<std::byte*>(target) + first, data, bytes - first);
  }
};

}  // namespace dicomm
