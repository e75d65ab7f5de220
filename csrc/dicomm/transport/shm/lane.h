// What the two ends of one direction share: the sender's bytes in a ring, whether the receiver can
// read the sender's memory, and the long message that both are copying.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "transport/shm/joint_copy.h"
#include "transport/shm/ring.h"

namespace dicomm {

// Offers that the sender took back and the receiver has yet to answer: what it reads of them may be
// anything. The sender writes it.
class TakenBack {
 public:
  // False: there are too many.
  bool add(std::uint32_t id) { return put(0, id, 1); }
  void remove(std::uint32_t id) {
    if (count_.load(std::memory_order_relaxed) > 0) put(id, 0, -1);
  }
  bool contains(std::uint32_t id) const {
    return count_.load(std::memory_order_acquire) > 0 &&
           std::ranges::any_of(
               ids_, [&](const auto& each) { return each.load(std::memory_order_acquire) == id; });
  }

 private:
  bool put(std::uint32_t before, std::uint32_t id, int more) {
    for (auto& each : ids_) {
      if (each.load(std::memory_order_relaxed) != before) continue;
      each.store(id, std::memory_order_release);
      count_.fetch_add(more, std::memory_order_seq_cst);
      return true;
    }
    return false;
  }

  std::atomic<std::uint32_t> count_;
  std::array<std::atomic<std::uint32_t>, 1024> ids_;  // 0: none
};

struct Lane {
  enum Finding : std::uint32_t { not_known, unreadable, readable };

  Ring ring;
  JointCopy joint;

  // The sender's: where in its memory a PeerMemory::Probe lies, and the word in it.
  alignas(64) std::atomic<std::uint64_t> probe_address;
  std::atomic<std::uint64_t> probe_word;
  std::atomic<std::uint32_t> withdrawn;  // 1: its memory is not to be read any more
  TakenBack taken_back;
  // The receiver's.
  std::atomic<std::uint32_t> finding;
};

}  // namespace dicomm
