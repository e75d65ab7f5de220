#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <cerrno>
#include <new>

#include "core/communicator.h"
#include "core/text.h"
#include "transport/shm/ring.h"
#include "transport/shm/shm.h"

namespace dicomm {

namespace {

// One pull's piece: short messages and aborts get in between.
constexpr std::size_t kPullBytes = 1 << 20;
constexpr std::size_t kSegmentBytes = 2 * sizeof(Ring);  // the owner writes the first

class ShmStream final : public Stream {
 public:
  ShmStream(Fd socket, Ring* rings, bool owner)
      : socket_(std::move(socket)),
        rings_(rings),
        out_(rings[owner ? 0 : 1]),
        in_(rings[owner ? 1 : 0]) {
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0)
      peer_pid_ = peer.pid;
    (void)!::getrandom(&probe_, sizeof probe_, 0);
    out_.probe_value.store(probe_);
    out_.probe_address.store(reinterpret_cast<std::uint64_t>(&probe_));
  }
  ~ShmStream() override { ::munmap(rings_, kSegmentBytes); }

  std::size_t write(const iovec* parts, int count) override {
    if (ended_) throw StreamEnd{"its connection closed"};
    std::size_t room = Ring::kBytes - Ring::bounded(written_ - consumed_seen_);
    std::size_t wanted = 0;
    for (int i = 0; i < count; ++i) wanted += parts[i].iov_len;
    if (room < wanted) {
      consumed_seen_ = out_.consumed.load(std::memory_order_acquire);
      room = Ring::kBytes - Ring::bounded(written_ - consumed_seen_);
    }
    std::size_t sent = 0;
    for (int i = 0; i < count && room > 0; ++i) {
      const std::size_t bytes = std::min(parts[i].iov_len, room);
      if (bytes == 0) continue;
      out_.put(written_ + sent, parts[i].iov_base, bytes);
      sent += bytes;
      room -= bytes;
    }
    if (sent == 0) return 0;
    written_ += sent;
    out_.written.store(written_, std::memory_order_release);
    ring_bell(out_.reader_asleep);
    return sent;
  }

  std::size_t read(void* data, std::size_t bytes) override {
    if (read_ == written_seen_) written_seen_ = in_.written.load(std::memory_order_acquire);
    const std::size_t taken = std::min(Ring::bounded(written_seen_ - read_), bytes);
    if (taken == 0) {
      // Everything written before the end counts: look again once the end is known.
      if (bytes > 0 && ended_ && in_.written.load(std::memory_order_acquire) == read_)
        throw StreamEnd{"its connection closed"};
      return 0;
    }
    in_.take(read_, data, taken);
    read_ += taken;
    in_.consumed.store(read_, std::memory_order_release);
    ring_bell(in_.writer_asleep);
    return taken;
  }

  // With the peer's memory at hand, one copy beats two from here on.
  std::size_t eager_bytes() const override { return 8 << 10; }

  bool can_pull(const Pull&) override {
    if (!pull_probed_) {
      pull_probed_ = true;
      std::uint64_t value = 0;
      const std::uint64_t address = in_.probe_address.load();
      iovec local{&value, sizeof value};
      iovec remote{reinterpret_cast<void*>(address), sizeof value};
      can_pull_ = address != 0 && peer_pid_ > 0 &&
                  ::process_vm_readv(peer_pid_, &local, 1, &remote, 1, 0) == sizeof value &&
                  value == in_.probe_value.load();
    }
    return can_pull_;
  }

  bool pull(Pull& pull) override {
    const std::size_t bytes = std::min<std::uint64_t>(kPullBytes, pull.bytes - pull.moved);
    iovec local{pull.data + pull.moved, bytes};
    iovec remote{reinterpret_cast<void*>(pull.address + pull.moved), bytes};
    const ssize_t got = ::process_vm_readv(peer_pid_, &local, 1, &remote, 1, 0);
    if (got <= 0) throw StreamEnd{"its memory cannot be read: " + system_error(errno)};
    pull.moved += got;
    pollfd life{socket_.get(), POLLRDHUP, 0};
    if (::poll(&life, 1, 0) != 0)  // its process id may have been reused
      throw StreamEnd{"its connection closed"};
    return in_.withdrawn.load(std::memory_order_acquire) == 0;
  }

  void withdraw() override { out_.withdrawn.store(1, std::memory_order_seq_cst); }

  int fd() const override { return socket_.get(); }
  bool cheap_to_poll() const override { return true; }

  void on_event() override {
    char bells[64];
    ssize_t got;
    while ((got = ::recv(socket_.get(), bells, sizeof bells, MSG_DONTWAIT)) > 0) {
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) ended_ = true;
  }

  bool prepare_sleep(bool want_to_write) override {
    in_.reader_asleep.store(1, std::memory_order_relaxed);
    out_.writer_asleep.store(want_to_write, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (in_.written.load(std::memory_order_acquire) != read_) return false;
    return !want_to_write ||
           written_ - out_.consumed.load(std::memory_order_acquire) >= Ring::kBytes;
  }

  void woke() override {
    in_.reader_asleep.store(0, std::memory_order_relaxed);
    out_.writer_asleep.store(0, std::memory_order_relaxed);
  }

  void finish_writing() override { ::shutdown(socket_.get(), SHUT_WR); }

 private:
  // Pairs with the fence in prepare_sleep(): either the sleeper sees our bytes, or we see it sleep.
  void ring_bell(std::atomic<std::uint32_t>& asleep) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (asleep.load(std::memory_order_relaxed) == 0) return;
    asleep.store(0, std::memory_order_relaxed);
    const char bell = 1;
    (void)!::send(socket_.get(), &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  Fd socket_;
  Ring* rings_;
  Ring& out_;
  Ring& in_;
  std::uint64_t written_ = 0, consumed_seen_ = 0, read_ = 0, written_seen_ = 0;
  bool ended_ = false;
  int peer_pid_ = -1;
  std::uint64_t probe_ = 0;
  bool pull_probed_ = false, can_pull_ = false;
};

}  // namespace

Fd make_segment() {
  Fd segment(::memfd_create("dicomm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment || ::fallocate(segment.get(), 0, 0, kSegmentBytes) != 0 ||
      ::fcntl(segment.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw Error(
        text("cannot make ", kSegmentBytes, " bytes of shared memory: ", system_error(errno)));
  return segment;
}

std::unique_ptr<Stream> shm_stream(Fd socket, Fd segment, bool owner) {
  struct stat status{};
  if (::fstat(segment.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != kSegmentBytes)
    throw Error("the peer's shared memory has another size: another version?");
  void* memory =
      ::mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment.get(), 0);
  if (memory == MAP_FAILED) throw Error(text("cannot map shared memory: ", system_error(errno)));
  return std::make_unique<ShmStream>(std::move(socket), static_cast<Ring*>(memory), owner);
}

}  // namespace dicomm
