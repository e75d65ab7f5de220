// What verbs connections say to each other; all fields little-endian.
//
// Meeting. The bootstrap socket's handshake (core/handshake.h) carries a Card each way. For every
// rail i below both cards' `rails` the two sides connect one RC queue pair to rail i's of the
// other, with the smaller MTU. The acceptor is ready to receive before it sends its card. The
// dialler, once it can send, sends an empty slot on every rail; the acceptor uses a rail only
// after it received something there.
//
// rdma_cm. Where both sides' rails have it, the acceptor's card names a port (port space TCP, the
// rail's address), which the dialler calls with the card's nonce as private data. Where one such
// port was named, the dialler then sends one byte over the socket, a bit for each rail that rdma_cm
// connected; the acceptor connects the others by the cards and, once it is ready to receive, sends
// one byte back.
//
// Stream. The bytes travel in slots: one SEND each, of a SlotHeader and up to slot_bytes -
// sizeof(SlotHeader) bytes. A slot with bytes has a sequence number (from 1) and is kept by its
// sender until the peer counts it as consumed; at most Card::slots are out at a time, in all and
// on one rail. Each side uses one rail for its slots. Empty slots, which only carry the header's
// counters, are outside the numbering; at most kSpareSlots of them are out at a time. A receiver
// has buffers for all that one peer may have out, though not for all peers at once: where it has
// none left, the sender's device sends again (RNR), for as long as it takes.
//
// Fronts. Where the 48 bytes that a slot begins with, its header and a short frame's, are those of
// the numbered slot before it on the rail, but for `sequence` being the next and the two counters
// being at most 255 more, the slot may travel without them, by a SEND with an immediate: the low
// bytes of `consumed` and, in bits 8 to 15, of `consumed_here` (RailCard::abridges says whether
// the receiver understands that). A message of 4 KiB then is one packet.
//
// Long messages. The receiver reads them by RDMA READ, in chunks, on any rail, with the keys that
// came with the offer: MemoryKeys[i] is the rkey on rail i.
//
// Failure. A side that sees a rail fail closes its queue pair, clears the rail's bit in `rails_up`
// and sends all unconsumed slots again, from the first, on another rail; the peer does the same
// when it sees the bit gone. Slots that had come before are dropped by number. A chunk that was
// being read is read again on another rail.
//
// The socket stays open: its end is the peer's. It also carries SocketMessages: slots, after a
// side withdrew its memory (it closed its queue pairs, as its buffers are no longer to be read),
// and why a side gave up, where no rail is left.
#pragma once

#include <array>
#include <cstdint>

#include "transport/verbs/abi.h"
#include "transport/verbs/settings.h"

namespace dicomm::verbs {

constexpr int kMaxRails = 8;
constexpr std::uint32_t kCardVersion = 2;
constexpr std::uint32_t kSpareSlots = 16;
// What this side's card says.
constexpr std::uint32_t kSlots = 64;        // a power of two: of numbers that wrap, modulo
constexpr std::uint32_t kSlotBytes = 8320;  // 8 KiB and the headers

using CmNonce = std::array<std::uint8_t, 16>;

struct RailCard {
  ibv::Gid gid;
  std::uint32_t qp_number;
  std::uint32_t psn;  // 24 bits: the first packet's number
  std::uint16_t lid;  // InfiniBand
  std::uint8_t link_layer;
  std::uint8_t roce_v2;
  std::uint8_t mtu;       // 1: 256 ... 5: 4096 bytes
  std::uint8_t reads_in;  // RDMA READs the port answers at a time
  std::uint8_t port;
  Connect connect;
  std::uint16_t cm_port;  // 0: call nobody there
  CmNonce cm_nonce;
  std::uint8_t abridges;  // 1: slots may come without their front
  std::uint8_t reserved[13];
};
static_assert(sizeof(RailCard) == 64);

struct Card {
  std::uint32_t version;  // 0: no verbs
  std::uint32_t rails;
  std::uint32_t slots;
  std::uint32_t slot_bytes;
  RailCard rail[kMaxRails];
};
static_assert(sizeof(Card) == 528);

struct SlotHeader {
  std::uint32_t sequence;       // 0: no bytes follow
  std::uint32_t consumed;       // of the peer's numbered slots, so far
  std::uint32_t consumed_here;  // of those that came on rail `consumed_rail`, doubles included
  std::uint8_t consumed_rail;
  std::uint8_t rails_up;  // a bit each
  std::uint16_t magic;
};
static_assert(sizeof(SlotHeader) == 16);
constexpr std::uint16_t kSlotMagic = 0x6476;

struct SocketMessage {
  enum Kind : std::uint32_t { slot = 1, failed };
  Kind kind;
  std::uint32_t bytes;  // that follow: a SlotHeader and its bytes, or a text
};

}  // namespace dicomm::verbs
