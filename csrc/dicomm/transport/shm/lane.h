// What the two ends of one direction share: the sender's bytes in a ring, whether the receiver can
// read the sender's memory, and the long message that both are copying.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/shm/joint_copy.h"
#include "transport/shm/ring.h"

namespace dicomm {

struct Lane {
  enum Finding : std::uint32_t { not_known, unreadable, readable };

  Ring ring;
  JointCopy joint;

  // The sender's: where in its memory a PeerMemory::Probe lies, and the word in it.
  alignas(64) std::atomic<std::uint64_t> probe_address;
  std::atomic<std::uint64_t> probe_word;
  std::atomic<std::uint32_t> withdrawn;  // 1: its memory is not to be read any more
  // The receiver's.
  std::atomic<std::uint32_t> finding;
};

}  // namespace dicomm
