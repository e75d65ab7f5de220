// One rail of a connection: its queue pair, and what is under way on it.
#pragma once

#include <memory>
#include <string>

#include "transport/verbs/fronts.h"
#include "transport/verbs/receive_buffers.h"

namespace dicomm::cm {
struct Id;
}

namespace dicomm::verbs {

constexpr std::uint32_t kSignalEvery = 16;  // sends: one completion tells of all before it
constexpr std::uint32_t kReadsAtOnce = 4;
constexpr std::uint32_t kSendDepth = kSlots + kSpareSlots + kSignalEvery;

// What a completion's id says it is of, in the high bits.
enum Work : std::uint64_t { receive_work = 0, send_work, read_work };
constexpr int kWorkShift = 56;

class Link {
  std::shared_ptr<ReceiveBuffers> receives_;  // first: the queue pair goes before it

 public:
  Link(Rails& rails, std::size_t rail, const GidEntry* gid);  // throws Error
  ~Link();

  RailCard card() const { return pair.card(gid); }
  // As the cards tell, or by rdma_cm's route. Both throw Error.
  void connect(const RailCard& theirs);
  void connect(const RailCard& theirs, const ibv::QpAttributes& route, std::shared_ptr<cm::Id> id);
  // Nothing begins here any more, and what arrived is dropped: it comes again on another rail.
  void close();
  // Collects what ended where nobody asks what it was. A status that tells why the rail failed, or
  // kFlushed where none does.
  int drain();
  int drop(const ibv::Completion& completion);  // one, of which its status is returned

  bool up() const { return !pair.closed(); }
  bool has_send_room() const { return sends_posted - sends_completed < kSendDepth; }
  bool has_read_room() const { return reads < std::min(kReadsAtOnce, pair.reads_out()); }
  bool shares_receives() const { return receives_->shared_queue() != nullptr; }
  ReceiveBuffers& receives() const { return *receives_; }
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
};

}  // namespace dicomm::verbs
