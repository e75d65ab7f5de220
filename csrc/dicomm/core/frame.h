// What travels on a Stream: a header, then `payload_bytes()` of payload.
//
// A short message is one eager frame. A long one is offered, as is every one in a chip's memory;
// the receiver, once it has a buffer, either pulls it from the sender's memory and says done, or
// accepts it, and the sender streams it as data frames.
//
// A context says which of the communicators that share the connection a frame is about.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/chip_buffer.h"
#include "core/stream.h"

namespace dicomm {

enum class FrameKind : std::uint8_t {
  eager = 1,   // context, tag, bytes, delivered_at_ns; payload
  offer,       // context, tag, bytes (of the message), id, address, delivered_at_ns; payload:
               // MemoryKeys
  accept,      // id
  data,        // id, bytes; payload
  done,        // id: the sender's buffer is free
  cancel,      // id: the sender takes its offer back; an offer not answered yet is, by done
  credit,      // only the credit field
  abort,       // context, bytes; payload is the reason
  goodbye,     // all communicators are closed in order: nothing follows
  offer_chip,  // an offer without an address; payload: MemoryHandle
  join,        // context: the writer's communicator counts on the peer's
  leave,       // context: the writer closed that communicator in order
};

constexpr bool is_offer(FrameKind kind) {
  return kind == FrameKind::offer || kind == FrameKind::offer_chip;
}

struct FrameHeader {
  std::uint16_t magic = kMagic;  // a stream out of step is noticed at once
  FrameKind kind{};
  std::uint8_t is_long = 0;  // the last two fields follow
  std::uint32_t credit = 0;  // eager bytes the writer of this frame consumed since its last one
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint32_t id = 0;
  std::uint32_t context = 0;
  std::uint64_t address = 0;
  std::int64_t delivered_at_ns = 0;

  static constexpr std::uint16_t kMagic = 0x4344;
  static constexpr std::size_t kShortBytes = 32;

  // What of it travels.
  std::size_t header_bytes() const { return is_long ? sizeof(FrameHeader) : kShortBytes; }

  std::uint64_t payload_bytes() const {
    if (kind == FrameKind::offer) return sizeof(MemoryKeys);
    if (kind == FrameKind::offer_chip) return sizeof(MemoryHandle);
    return kind == FrameKind::eager || kind == FrameKind::data || kind == FrameKind::abort ? bytes
                                                                                           : 0;
  }
};
static_assert(sizeof(FrameHeader) == 48 &&
              offsetof(FrameHeader, address) == FrameHeader::kShortBytes);

// An eager message costs its receiver this much besides its payload.
constexpr std::size_t kMessageOverheadBytes = 64;
// Eager bytes on their way to one peer or waiting there unmatched; beyond, messages are offered.
constexpr std::size_t kCreditBytes = 4 << 20;
// Offers to one peer that it has not answered. Each costs the peer about 200 bytes, as a short
// message beyond the credit does; a sender fails the next send, and a peer that does not is cut
// off.
constexpr std::size_t kMaxOffers = 1 << 18;
// The unit in which long messages move, so that short ones and aborts get in between.
constexpr std::size_t kChunkBytes = 1 << 20;
constexpr std::size_t kMaxReasonBytes = 4096;
// Communicators that a connection has in its life. Each costs 40 bytes.
constexpr std::size_t kMaxContexts = 1 << 20;

}  // namespace dicomm
