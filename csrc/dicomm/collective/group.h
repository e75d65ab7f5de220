// The ranks that take part in a collective, in the order that numbers them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/communicator.h"

namespace dicomm {

class Group {
 public:
  // ranks: communicator ranks in group order, empty for all of them; must hold the caller's.
  // id: tells several groups on one communicator apart, the same on every member.
  explicit Group(std::shared_ptr<Communicator> communicator, std::vector<int> ranks = {},
                 std::uint16_t id = 0);

  int rank() const { return rank_; }  // this process, numbered within the group
  int size() const { return static_cast<int>(ranks_.size()); }
  int communicator_rank(int rank) const { return ranks_.at(rank); }
  Communicator& communicator() const { return *communicator_; }

  // The tag of the next collective. Every member takes its tags in the same order, so each
  // collective has its own and two in flight cannot mix. Tags with the top bit set are the
  // collectives'; point-to-point messages use the others.
  std::uint64_t next_tag();

 private:
  std::shared_ptr<Communicator> communicator_;
  std::vector<int> ranks_;
  int rank_ = -1;
  std::uint64_t first_tag_;
  std::atomic<std::uint64_t> issued_{0};
};

// One collective: the same tag on every rank, the caller's clock, and its patience.
struct Call {
  std::uint64_t tag;
  std::int64_t ready_at_ns = 0;  // when the input is ready on an emulated chip's clock (0: now)
  std::chrono::milliseconds timeout{300'000};  // for the whole collective
};

}  // namespace dicomm
