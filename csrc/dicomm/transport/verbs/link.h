// One rail of a connection: its queue pair, its receive buffers, and what is under way on it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/verbs/fronts.h"
#include "transport/verbs/queue_pair.h"

namespace dicomm::cm {
struct Id;
}

namespace dicomm::verbs {

constexpr std::uint32_t kSlots = 64;        // a power of two: of numbers that wrap, modulo
constexpr std::uint32_t kSlotBytes = 8320;  // 8 KiB and the headers
constexpr std::uint32_t kFrontRoom = 64;    // before each receive buffer, for the front it lacks
constexpr std::uint32_t kSignalEvery = 16;  // sends: one completion tells of all before it
constexpr std::uint32_t kReadsAtOnce = 4;
constexpr std::uint32_t kSendDepth = kSlots + kSpareSlots + kSignalEvery;

// Memory of our own that the devices may use.
class SlotMemory {
 public:
  SlotMemory(std::size_t bytes, const Rails& rails);  // throws Error
  ~SlotMemory();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  std::byte* data() const { return data_; }
  std::uint32_t lkey(std::size_t device) const { return registration_->on(device)->lkey; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
  std::shared_ptr<Registration> registration_;
};

class Link {
  SlotMemory receive_memory_;  // first: the queue pair goes before it

 public:
  Link(const Rails& rails, std::size_t rail, const GidEntry* gid);  // throws Error

  RailCard card() const { return pair.card(gid); }
  // As the cards tell, or by rdma_cm's route. Both throw Error.
  void connect(const RailCard& theirs);
  void connect(const RailCard& theirs, const ibv::QpAttributes& route, std::shared_ptr<cm::Id> id);

  bool up() const { return !pair.closed(); }
  bool has_send_room() const { return sends_posted - sends_completed < kSendDepth; }
  bool has_read_room() const { return reads < std::min(kReadsAtOnce, pair.reads_out()); }

  std::byte* received(std::uint32_t buffer) const {
    return receive_memory_.data() + std::size_t{buffer} * (kFrontRoom + kSlotBytes) + kFrontRoom;
  }
  // A receive buffer was read; the device gets it back, a few at a time. Throws RailError.
  void give_back(std::uint32_t buffer);
  std::string describe() const;

  QueuePair pair;
  const GidEntry* const gid;
  const std::size_t device_index;
  RailCard peer{};
  std::shared_ptr<cm::Id> cm_id;  // where rdma_cm connected it
  bool heard = false;             // the peer is ready to receive here
  Fronts fronts_out, fronts_in;

  // Numbered slots: how many went out here, how many of those the peer has read, and how many of
  // the peer's came in here and were read.
  std::uint32_t sent = 0, sent_consumed = 0, consumed = 0;
  // Send requests, those of empty slots included.
  std::uint32_t sends_posted = 0, sends_completed = 0, unsignaled = 0;
  std::uint32_t reads = 0;  // under way

 private:
  void post_receives(const std::uint32_t* buffers, std::uint32_t count);

  std::vector<std::uint32_t> returned_;
};

}  // namespace dicomm::verbs
