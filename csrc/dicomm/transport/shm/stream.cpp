#include "transport/shm/stream.h"

#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/shm/cache.h"

namespace dicomm {

class Gather {
 public:
  explicit Gather(const iovec* parts) : part_(parts) {}

  void copy(std::byte* target, std::size_t bytes) {
    while (bytes > 0) {
      const std::size_t here = std::min(bytes, part_->iov_len - at_);
      dicomm::copy(target, static_cast<const std::byte*>(part_->iov_base) + at_, here);
      target += here;
      bytes -= here;
      at_ += here;
      if (at_ == part_->iov_len) ++part_, at_ = 0;
    }
  }

 private:
  const iovec* part_;
  std::size_t at_ = 0;
};

// A slot may have told more already.
static void advance(std::uint64_t& seen, std::uint64_t told) {
  if (static_cast<std::int64_t>(told - seen) > 0) seen = told;
}

ShmStream::ShmStream(Fd socket, Lane* lanes, bool owner)
    : socket_(std::move(socket)),
      lanes_(lanes),
      out_(lanes[owner ? 0 : 1]),
      in_(lanes[owner ? 1 : 0]),
      peer_(socket_),
      sending_(out_.joint),
      receiving_(in_.joint) {
  offer_probe();
}

ShmStream::~ShmStream() { ::munmap(lanes_, 2 * sizeof(Lane)); }

std::size_t ShmStream::write(const iovec* parts, int count) {
  if (ended_) throw StreamEnd{"its connection closed"};
  std::size_t wanted = 0;
  for (int i = 0; i < count; ++i) wanted += parts[i].iov_len;
  Gather source(parts);
  std::size_t sent = 0;
  while (sent < wanted) {
    const std::size_t bytes = room(wanted - sent);
    if (bytes == 0) break;
    write_piece(bytes, [&](std::byte* piece) { source.copy(piece, bytes); });
    sent += bytes;
  }
  if (sent > 0) ring_bell(out_.ring.reader_asleep);
  return sent;
}

bool ShmStream::write_at_once(const void* header, std::size_t header_bytes, const void* payload,
                              std::size_t payload_bytes) {
  const std::size_t bytes = header_bytes + payload_bytes;
  if (ended_ || bytes > shm::kEagerBytes || room(bytes) < bytes) return false;
  write_piece(bytes, [&](std::byte* piece) {
    dicomm::copy(piece, header, header_bytes);
    if (payload_bytes > 0) dicomm::copy(piece + header_bytes, payload, payload_bytes);
  });
  ring_bell(out_.ring.reader_asleep);
  return true;
}

std::size_t ShmStream::read(void* data, std::size_t bytes) {
  if (piece_left_ == 0 && !next_piece()) {
    // Everything written before the end counts: look again once the end is known.
    if (bytes > 0 && ended_ && !next_piece()) throw StreamEnd{"its connection closed"};
    return 0;
  }
  const std::size_t taken = std::min(piece_left_, bytes);
  dicomm::copy(data, piece_, taken);
  piece_ += taken;
  piece_left_ -= taken;
  if (piece_left_ == 0) piece_read();
  return taken;
}

void ShmStream::on_event() {
  char bells[64];
  ssize_t got;
  while ((got = ::recv(socket_.get(), bells, sizeof bells, MSG_DONTWAIT)) > 0) {
  }
  if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) ended_ = true;
}

bool ShmStream::prepare_sleep(bool want_to_write) {
  publish_consumed();
  in_.ring.reader_asleep.store(1, std::memory_order_relaxed);
  out_.ring.writer_asleep.store(want_to_write, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (piece_left_ > 0 || piece_waits()) return false;
  if (writes_ && !exposed_.empty() && sending_.slices_left(exposed_)) return false;
  return !want_to_write || room(Slot::kInlineBytes + 1) == 0;
}

void ShmStream::woke() {
  in_.ring.reader_asleep.store(0, std::memory_order_relaxed);
  out_.ring.writer_asleep.store(0, std::memory_order_relaxed);
}

bool ShmStream::peer_shares_core(int core) {
  if (core != told_core_) in_.ring.reader_core.store(told_core_ = core, std::memory_order_relaxed);
  return out_.ring.reader_core.load(std::memory_order_relaxed) == core;
}

LinkDescription ShmStream::describe() const { return {"shm", {}, {}}; }

void ShmStream::finish_writing() { ::shutdown(socket_.get(), SHUT_WR); }

// How much of the next piece there is a place for.
std::size_t ShmStream::room(std::size_t wanted) {
  for (const bool fresh : {false, true}) {
    if (fresh) {
      advance(consumed_slots_seen_, out_.ring.consumed_slots.load(std::memory_order_acquire));
      advance(consumed_bytes_seen_, out_.ring.consumed_bytes.load(std::memory_order_acquire));
    }
    // The counters are the peer's to write: any difference must do no harm here.
    if (written_slots_ - consumed_slots_seen_ >= Ring::kSlots) continue;
    if (wanted <= Slot::kInlineBytes) return wanted;
    const std::uint64_t used = written_bytes_ - consumed_bytes_seen_;
    if (used >= Ring::kBytes) continue;
    return std::min({wanted, Ring::kPieceBytes, Ring::kBytes - used,
                     Ring::kBytes - written_bytes_ % Ring::kBytes});
  }
  return 0;
}

// bytes: at most what room() said.
template <class Copy>
void ShmStream::write_piece(std::size_t bytes, Copy&& copy_to) {
  Slot& slot = out_.ring.slots[written_slots_ % Ring::kSlots];
  const bool fits_slot = bytes <= Slot::kInlineBytes;
  const bool from_beginning = !fits_slot && written_bytes_ % Ring::kBytes == 0;
  std::byte* const piece = fits_slot ? slot.data : out_.ring.data + written_bytes_ % Ring::kBytes;
  copy_to(piece);
  slot.read_slots = static_cast<std::uint32_t>(read_slots_);
  slot.turn_and_bytes.store(std::uint64_t{Ring::turn(written_slots_)} << 32 |
                                (from_beginning ? Slot::kFromBeginning : 0) | bytes,
                            std::memory_order_release);
  ++written_slots_;
  if (!fits_slot) {
    if (!crowded_) hand_over(piece, bytes);
    written_bytes_ += Ring::aligned(bytes);
  }
}

bool ShmStream::piece_waits() const {
  const Slot& slot = in_.ring.slots[read_slots_ % Ring::kSlots];
  return slot.turn_and_bytes.load(std::memory_order_acquire) >> 32 == Ring::turn(read_slots_);
}

bool ShmStream::next_piece() {
  const Slot& slot = in_.ring.slots[read_slots_ % Ring::kSlots];
  const std::uint64_t word = slot.turn_and_bytes.load(std::memory_order_acquire);
  if (word >> 32 != Ring::turn(read_slots_)) return false;
  const std::size_t bytes = word & (Slot::kFromBeginning - 1);
  if (slot.read_slots == static_cast<std::uint32_t>(written_slots_)) all_read();
  if (bytes == 0) throw StreamEnd{"it wrote nonsense into shared memory"};
  if (!probed_) probe();  // the peer is there
  piece_left_ = bytes;
  if (bytes <= Slot::kInlineBytes) {
    piece_ = slot.data;
    return true;
  }
  if (word & Slot::kFromBeginning) read_bytes_ = Ring::beginning(read_bytes_);
  const std::size_t at = read_bytes_ % Ring::kBytes;
  if (bytes > Ring::kPieceBytes || bytes > Ring::kBytes - at)
    throw StreamEnd{"it wrote nonsense into shared memory"};
  piece_ = in_.ring.data + at;
  fetch(piece_, bytes);
  read_bytes_ += Ring::aligned(bytes);
  return true;
}

// The peer has read everything that was written to it.
void ShmStream::all_read() {
  written_bytes_ = Ring::beginning(written_bytes_);
  consumed_slots_seen_ = written_slots_;
  consumed_bytes_seen_ = written_bytes_;
}

// The writer is told now and then only: each time costs both a cache line on its way.
void ShmStream::piece_read() {
  ++read_slots_;
  if (read_slots_ - told_slots_ >= Ring::kSlots / 4 ||
      read_bytes_ - told_bytes_ >= Ring::kBytes / 16)
    publish_consumed();
}

void ShmStream::publish_consumed() {
  if (told_slots_ == read_slots_) return;
  // Of a piece that is still being read, nothing is free yet.
  told_slots_ = read_slots_;
  told_bytes_ = read_bytes_;
  in_.ring.consumed_bytes.store(told_bytes_, std::memory_order_release);
  in_.ring.consumed_slots.store(told_slots_, std::memory_order_release);
  ring_bell(in_.ring.writer_asleep);
}

// Pairs with the fence in prepare_sleep(): either the sleeper sees our bytes, or we see it sleep.
void ShmStream::ring_bell(std::atomic<std::uint32_t>& asleep) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep.load(std::memory_order_relaxed) == 0) return;
  asleep.store(0, std::memory_order_relaxed);
  const char bell = 1;
  (void)!::send(socket_.get(), &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace dicomm
