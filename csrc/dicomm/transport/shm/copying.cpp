// Long messages: the receiver reads them from the sender's memory, and where both have a core the
// sender writes its part of the slices into the receiver's.
#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "transport/shm/stream.h"

namespace dicomm {

namespace {

// How long a receiver that gives up waits for the part that its sender is copying, which takes
// less than a millisecond: the sender may have been stopped meanwhile.
constexpr std::chrono::seconds kLetGo{5};

}  // namespace

void ShmStream::offer_probe() {
  PeerMemory::allow_peers();
  if (::getrandom(&probe_.word, sizeof probe_.word, 0) != sizeof probe_.word) return;
  out_.probe_word.store(probe_.word, std::memory_order_relaxed);
  out_.probe_address.store(reinterpret_cast<std::uint64_t>(&probe_), std::memory_order_release);
}

// Reading and writing: a filter may forbid one of them alone.
void ShmStream::probe() {
  const std::uint64_t address = in_.probe_address.load(std::memory_order_acquire);
  if (probed_ || address == 0) return;
  probed_ = true;
  std::uint64_t word = 0;
  reads_ = peer_.read(&word, address, sizeof word) &&
           word == in_.probe_word.load(std::memory_order_relaxed);
  writes_ = reads_ && peer_.write(&word, address + offsetof(PeerMemory::Probe, room), sizeof word);
  in_.finding.store(reads_ ? Lane::readable : Lane::unreadable, std::memory_order_relaxed);
}

bool ShmStream::can_pull(const Pull&) {
  probe();
  return reads_;
}

MemoryKeys ShmStream::expose(std::uint64_t id, const void* data, std::size_t bytes) {
  if (bytes >= shm::kJointBytes) exposed_[id] = {static_cast<const std::byte*>(data), bytes};
  return {};
}

void ShmStream::conceal(std::uint64_t id) {
  exposed_.erase(id);
  out_.taken_back.remove(static_cast<std::uint32_t>(id));
}

// No part of it is being copied here: that is done under the mutex, too.
bool ShmStream::take_back(std::uint64_t id) {
  exposed_.erase(id);
  return out_.taken_back.add(static_cast<std::uint32_t>(id));
}

// Then nothing more of it is copied, and nobody takes what was for the message.
bool ShmStream::is_taken_back(Pull& pull) {
  if (!in_.taken_back.contains(pull.id)) return false;
  if (receiving_.open() && receiving_.offer() == pull.id) receiving_.leave();
  refused_ = false;
  pull.moved = 0;
  return true;
}

Pulled ShmStream::pull(Pull& pull, bool with_sender) {
  if (is_taken_back(pull)) return Pulled::waiting;
  if (with_sender && !receiving_.open() && pull.moved == 0 && pull.bytes >= shm::kJointBytes &&
      pull.id != alone_) {
    receiving_.begin(pull, shm::kSliceBytes);
    if (pull.bytes >= shm::kWakeBytes) ring_bell(out_.ring.reader_asleep);
  }
  const Pulled how = receiving_.open() ? pull_jointly(pull) : pull_alone(pull);
  // What was read before a withdrawal is what the sender meant.
  std::atomic_thread_fence(std::memory_order_acquire);
  // In this order: a sender that withdraws forgets what it took back, but after that.
  if (is_taken_back(pull)) return Pulled::waiting;
  if (in_.withdrawn.load(std::memory_order_acquire) != 0) {
    receiving_.leave();  // the sender copies no slice any more
    return Pulled::withdrawn;
  }
  if (pull.done() && pull.bytes >= shm::kJointBytes && hung_up())
    throw StreamEnd{"its connection closed"};  // its process id may be another's by now
  return how;
}

Pulled ShmStream::pull_alone(Pull& pull) {
  const auto bytes =
      static_cast<std::size_t>(std::min<std::uint64_t>(shm::kPieceBytes, pull.bytes - pull.moved));
  if (!copy(pull, pull.moved, bytes)) return Pulled::refused;
  pull.moved += bytes;
  return Pulled::moved;
}

Pulled ShmStream::pull_jointly(Pull& pull) {
  if (const auto part = receiving_.take()) {
    if (copy(pull, part->offset, part->bytes)) return Pulled::moved;
    refused_ = true;
    receiving_.end();
  }
  if (!receiving_.all_through()) return Pulled::waiting;
  const bool again = receiving_.sender_failed();
  receiving_.leave();
  if (std::exchange(refused_, false)) return Pulled::refused;
  if (again)
    alone_ = pull.id;
  else
    pull.moved = pull.bytes;
  return Pulled::moved;
}

bool ShmStream::copy(const Pull& pull, std::uint64_t offset, std::size_t bytes) const {
  return peer_.read(pull.data + offset, pull.address + offset, bytes);
}

bool ShmStream::push() {
  if (exposed_.empty() || !writes_) return false;
  const auto task = sending_.take(exposed_);
  if (!task) return false;
  const bool failed = sending_.goes_on(*task) && !peer_.write(task->from, task->to, task->bytes);
  if (failed) writes_ = false;
  sending_.through(*task, failed);
  ring_bell(out_.ring.reader_asleep);
  return true;
}

bool ShmStream::abandon(Pull& pull) {
  if (!receiving_.open() || receiving_.offer() != pull.id) return true;
  receiving_.end();
  if (!receiving_.all_through()) return false;
  receiving_.leave();
  refused_ = false;
  return true;
}

void ShmStream::withdraw() {
  exposed_.clear();
  out_.withdrawn.store(1, std::memory_order_seq_cst);
  if (!receiving_.open()) return;
  receiving_.end();
  const auto deadline = std::chrono::steady_clock::now() + kLetGo;
  while (!receiving_.all_through() && !hung_up() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  receiving_.leave();
}

bool ShmStream::hung_up() const {
  pollfd life{socket_.get(), POLLRDHUP, 0};
  return ::poll(&life, 1, 0) != 0;
}

}  // namespace dicomm
