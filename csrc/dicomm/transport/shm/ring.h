// One direction of a shared segment: pieces of a byte stream, with one writer and one reader.
//
// A piece has a slot, one cache line, that says where its bytes are: in the slot itself, so that a
// short message is one line that travels from core to core; else in the ring of bytes, where a long
// message streams past while both copy. The reader watches the next slot for its turn to appear.
//
// A slot also says how many pieces of the other direction its writer has read. Where that is all of
// them, as when two sides take turns, the next bytes go to the ring's beginning: memory that was
// used just now is nearer to both cores.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dicomm {

struct Slot {
  static constexpr std::size_t kInlineBytes = 52;
  static constexpr std::uint64_t kFromBeginning = 1u << 31;  // where the piece is in the ring

  // The turn in the upper half: how often, at this piece, the slots will have been gone through.
  std::atomic<std::uint64_t> turn_and_bytes;
  std::uint32_t read_slots;  // of the other direction, as far as the number has room
  std::byte data[kInlineBytes];
};
static_assert(sizeof(Slot) == 64);

struct Ring {
  static constexpr std::size_t kSlots = 256;
  // Small enough to stay in the cache of a core, so that the two copies cost little more than one.
  static constexpr std::size_t kBytes = 256 << 10;
  static constexpr std::size_t kPieceBytes = 16 << 10;  // the reader starts once it has the first
  static constexpr std::size_t kAlignment = 64;         // of pieces in data

  // The reader's.
  alignas(64) std::atomic<std::uint64_t> consumed_slots;
  std::atomic<std::uint64_t> consumed_bytes;
  alignas(64) std::atomic<std::uint32_t> reader_asleep;
  std::atomic<std::int32_t> reader_core;  // where it last spun
  // The writer's.
  alignas(64) std::atomic<std::uint32_t> writer_asleep;

  alignas(64) Slot slots[kSlots];
  alignas(64) std::byte data[kBytes];

  static std::uint32_t turn(std::uint64_t piece) {
    return static_cast<std::uint32_t>(piece / kSlots + 1);
  }
  // The next one, from such a number of bytes on.
  static std::uint64_t beginning(std::uint64_t bytes) {
    return (bytes + kBytes - 1) / kBytes * kBytes;
  }
  static std::size_t aligned(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace dicomm
