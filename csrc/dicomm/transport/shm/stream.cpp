#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/communicator.h"
#include "core/text.h"
#include "transport/shm/ring.h"
#include "transport/shm/shm.h"

namespace dicomm {

namespace {

constexpr std::size_t kSegmentBytes = 2 * sizeof(Ring);  // the owner writes the first
// Touching memory that the peer took away would end this process.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Consecutive bytes of several parts.
class Gather {
 public:
  explicit Gather(const iovec* parts) : part_(parts) {}

  void copy(std::byte* target, std::size_t bytes) {
    while (bytes > 0) {
      const std::size_t here = std::min(bytes, part_->iov_len - at_);
      std::memcpy(target, static_cast<const std::byte*>(part_->iov_base) + at_, here);
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

class ShmStream final : public Stream {
 public:
  ShmStream(Fd socket, Ring* rings, bool owner)
      : socket_(std::move(socket)),
        rings_(rings),
        out_(rings[owner ? 0 : 1]),
        in_(rings[owner ? 1 : 0]) {}
  ~ShmStream() override { ::munmap(rings_, kSegmentBytes); }

  std::size_t write(const iovec* parts, int count) override {
    if (ended_) throw StreamEnd{"its connection closed"};
    std::size_t wanted = 0;
    for (int i = 0; i < count; ++i) wanted += parts[i].iov_len;
    Gather source(parts);
    std::size_t sent = 0;
    while (sent < wanted) {
      const std::size_t bytes = write_piece(source, wanted - sent);
      if (bytes == 0) break;
      sent += bytes;
    }
    if (sent > 0) ring_bell(out_.reader_asleep);
    return sent;
  }

  std::size_t read(void* data, std::size_t bytes) override {
    if (piece_left_ == 0 && !next_piece()) {
      // Everything written before the end counts: look again once the end is known.
      if (bytes > 0 && ended_ && !next_piece()) throw StreamEnd{"its connection closed"};
      return 0;
    }
    const std::size_t taken = std::min(piece_left_, bytes);
    std::memcpy(data, piece_, taken);
    piece_ += taken;
    piece_left_ -= taken;
    if (piece_left_ == 0) piece_read();
    return taken;
  }

  std::size_t eager_bytes() const override { return 64 << 10; }

  int fd() const override { return socket_.get(); }
  bool cheap_to_poll() const override { return true; }
  bool outlives_writer() const override { return true; }
  LinkDescription describe() const override { return {"shm", {}}; }

  void on_event() override {
    char bells[64];
    ssize_t got;
    while ((got = ::recv(socket_.get(), bells, sizeof bells, MSG_DONTWAIT)) > 0) {
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) ended_ = true;
  }

  bool prepare_sleep(bool want_to_write) override {
    publish_consumed();
    in_.reader_asleep.store(1, std::memory_order_relaxed);
    out_.writer_asleep.store(want_to_write, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (piece_left_ > 0 || piece_waits()) return false;
    return !want_to_write || room(Slot::kInlineBytes + 1) == 0;
  }

  void woke() override {
    in_.reader_asleep.store(0, std::memory_order_relaxed);
    out_.writer_asleep.store(0, std::memory_order_relaxed);
  }

  bool peer_shares_core(int core) override {
    if (core != told_core_) in_.reader_core.store(told_core_ = core, std::memory_order_relaxed);
    return out_.reader_core.load(std::memory_order_relaxed) == core;
  }

  void finish_writing() override { ::shutdown(socket_.get(), SHUT_WR); }

 private:
  // How much of the next piece there is a place for.
  std::size_t room(std::size_t wanted) {
    for (const bool fresh : {false, true}) {
      if (fresh) {
        consumed_slots_seen_ = out_.consumed_slots.load(std::memory_order_acquire);
        consumed_bytes_seen_ = out_.consumed_bytes.load(std::memory_order_acquire);
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

  std::size_t write_piece(Gather& source, std::size_t wanted) {
    const std::size_t bytes = room(wanted);
    if (bytes == 0) return 0;
    Slot& slot = out_.slots[written_slots_ % Ring::kSlots];
    if (bytes <= Slot::kInlineBytes) {
      source.copy(slot.data, bytes);
    } else {
      source.copy(out_.data + written_bytes_ % Ring::kBytes, bytes);
      written_bytes_ += Ring::aligned(bytes);
    }
    slot.turn_and_bytes.store(std::uint64_t{Ring::turn(written_slots_)} << 32 | bytes,
                              std::memory_order_release);
    ++written_slots_;
    return bytes;
  }

  bool piece_waits() const {
    const Slot& slot = in_.slots[read_slots_ % Ring::kSlots];
    return slot.turn_and_bytes.load(std::memory_order_acquire) >> 32 == Ring::turn(read_slots_);
  }

  bool next_piece() {
    const Slot& slot = in_.slots[read_slots_ % Ring::kSlots];
    const std::uint64_t word = slot.turn_and_bytes.load(std::memory_order_acquire);
    if (word >> 32 != Ring::turn(read_slots_)) return false;
    const std::size_t bytes = word & 0xffffffff;
    if (bytes == 0) throw StreamEnd{"it wrote nonsense into shared memory"};
    piece_left_ = bytes;
    if (bytes <= Slot::kInlineBytes) {
      piece_ = slot.data;
      return true;
    }
    const std::size_t at = read_bytes_ % Ring::kBytes;
    if (bytes > Ring::kPieceBytes || bytes > Ring::kBytes - at)
      throw StreamEnd{"it wrote nonsense into shared memory"};
    piece_ = in_.data + at;
    read_bytes_ += Ring::aligned(bytes);
    return true;
  }

  // The writer is told now and then only: each time costs both a cache line on its way.
  void piece_read() {
    ++read_slots_;
    if (read_slots_ - told_slots_ >= Ring::kSlots / 4 ||
        read_bytes_ - told_bytes_ >= Ring::kBytes / 16)
      publish_consumed();
  }

  void publish_consumed() {
    if (told_slots_ == read_slots_) return;
    // Of a piece that is still being read, nothing is free yet.
    told_slots_ = read_slots_;
    told_bytes_ = read_bytes_;
    in_.consumed_bytes.store(told_bytes_, std::memory_order_release);
    in_.consumed_slots.store(told_slots_, std::memory_order_release);
    ring_bell(in_.writer_asleep);
  }

  // Pairs with the fence in prepare_sleep(): either the sleeper sees our bytes, or we see it sleep.
  void ring_bell(std::atomic<std::uint32_t>& asleep) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (asleep.load(std::memory_order_relaxed) == 0) return;
    asleep.store(0, std::memory_order_relaxed);
    const char bell = 1;
    (void)!::send(socket_.get(), &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  Fd socket_;
  int told_core_ = -1;
  Ring* rings_;
  Ring& out_;
  Ring& in_;
  bool ended_ = false;

  std::uint64_t written_slots_ = 0, written_bytes_ = 0;
  std::uint64_t consumed_slots_seen_ = 0, consumed_bytes_seen_ = 0;

  const std::byte* piece_ = nullptr;
  std::size_t piece_left_ = 0;
  std::uint64_t read_slots_ = 0, read_bytes_ = 0, told_slots_ = 0, told_bytes_ = 0;
};

}  // namespace

Fd make_segment() {
  Fd segment(::memfd_create("dicomm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment || ::fallocate(segment.get(), 0, 0, kSegmentBytes) != 0 ||
      ::fcntl(segment.get(), F_ADD_SEALS, kSeals) != 0)
    throw Error(
        text("cannot make ", kSegmentBytes, " bytes of shared memory: ", system_error(errno)));
  return segment;
}

std::unique_ptr<Stream> shm_stream(Fd socket, Fd segment, bool owner) {
  const int seals = ::fcntl(segment.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw Error("the peer's shared memory is not sealed: it could be taken away while in use");
  struct stat status{};
  if (::fstat(segment.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != kSegmentBytes)
    throw Error("the peer's shared memory has another size: another version?");
  void* memory =
      ::mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment.get(), 0);
  if (memory == MAP_FAILED) throw Error(text("cannot map shared memory: ", system_error(errno)));
  ::madvise(memory, kSegmentBytes, MADV_DONTFORK);
  return std::make_unique<ShmStream>(std::move(socket), static_cast<Ring*>(memory), owner);
}

}  // namespace dicomm
