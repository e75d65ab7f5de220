// From which length on which way to move a message pays, as measured between two cores.
#pragma once

#include <cstddef>

namespace dicomm::shm {

// Through the ring, at once, where the receiver can read the sender's memory while the sender goes
// on; and where it cannot, or where each has to wait for a core until the other gives it up, which
// takes longer than the second copy.
constexpr std::size_t kEagerBytes = 8 << 10;
constexpr std::size_t kEagerByRingBytes = 64 << 10;

// Longer ones the receiver reads, from here on together with the sender.
constexpr std::size_t kJointBytes = 192 << 10;
// For so much a sender that sleeps is woken.
constexpr std::size_t kWakeBytes = 1 << 20;

// What one side copies at once, between looking after other messages.
constexpr std::size_t kPieceBytes = 1 << 20;
// The least that one side copies of a message that both copy: neither waits longer for the other.
constexpr std::size_t kSliceBytes = 128 << 10;

}  // namespace dicomm::shm
