// The buffers that peers' slots arrive in.
//
// The queue pairs of a device share a queue of them (SRQ). Then a rank has memory for what is on
// its way to it, not for what all peers might send at once: one peer's window from the start, a
// few more buffers for each further peer, and more whenever less than half of them are left, up to
// what fills every window or kMostShared. Where none is left, a sender's device sends the slot
// again until one is: see Settings::rnr_retry.
//
// Some devices have no shared queues (max_srq is 0). Their queue pairs have a queue each, with
// buffers for a whole window.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/verbs/queue_pair.h"
#include "transport/verbs/slot_pool.h"

namespace dicomm::verbs {

constexpr std::uint32_t kFrontRoom = 64;  // before each receive buffer, for the front it lacks
constexpr std::uint32_t kReceives = kSlots + kSpareSlots;  // what one peer may have on its way

class ReceiveBuffers;

// Posts the buffer again.
struct GiveBack {
  ReceiveBuffers* to = nullptr;
  std::uint32_t number = 0;

  void operator()(std::byte*) const;
};
// A buffer that a peer's slot arrived in.
using Received = std::unique_ptr<std::byte, GiveBack>;

// From any thread: connections are made on others than those that move bytes.
class ReceiveBuffers {
 public:
  ReceiveBuffers(std::shared_ptr<Device> device, bool shared);  // throws Error
  ~ReceiveBuffers();
  ReceiveBuffers(const ReceiveBuffers&) = delete;
  ReceiveBuffers& operator=(const ReceiveBuffers&) = delete;

  // What a queue pair is made with; null: it has a queue of its own.
  ibv::Srq* shared_queue() const { return shared_queue_; }
  // One more queue pair receives here, or the only one; until it leaves. Throws Error.
  void join(QueuePair& pair);
  // It has been destroyed. One buffer may be lost with it, where the peer died within a slot: no
  // device tells of that. Each queue pair brought more buffers than that, up to the most.
  void leave();

  // A completion says that something came in this buffer.
  Received take(std::uint32_t number);
  // Throws RailError where the device took some buffer no more.
  void check() const;

 private:
  friend struct GiveBack;

  struct Buffer {
    Slot slot;
    std::uint64_t posted_as = 0;  // its number in the order of posting
  };

  std::uint32_t room() const;
  void grow(std::uint32_t count);
  void give_back(std::uint32_t number);
  void post_returned();

  const std::shared_ptr<Device> device_;
  SlotPool pool_;
  ibv::Srq* shared_queue_ = nullptr;
  QueuePair* pair_ = nullptr;  // whose own queue this is
  std::mutex mutex_;
  std::uint32_t most_;
  std::uint32_t pairs_ = 0, joined_ = 0;  // now, and ever
  std::vector<Buffer> buffers_;
  std::vector<std::uint32_t> returned_;  // and are posted a few at a time
  // A device takes buffers in the order in which they were posted, so that those before the
  // youngest that came back are taken, too: the difference is what the device has left.
  std::uint64_t posted_ = 0, taken_ = 0;
  std::atomic<int> error_{0};
};

}  // namespace dicomm::verbs
