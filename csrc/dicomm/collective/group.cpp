#include "collective/group.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace dicomm {

namespace {
constexpr std::uint64_t kCollectiveTag = 1ULL << 63;
constexpr int kGroupIdShift = 47;  // 16 bits of group, 47 bits of operation
}  // namespace

Group::Group(std::shared_ptr<Communicator> communicator, std::vector<int> ranks, std::uint16_t id)
    : communicator_(std::move(communicator)),
      ranks_(std::move(ranks)),
      first_tag_(kCollectiveTag | (static_cast<std::uint64_t>(id) << kGroupIdShift)) {
  const int world_size = communicator_->world_size();
  if (ranks_.empty()) {
    ranks_.resize(world_size);
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0 || ranks_[i] >= world_size)
      throw Error("group: rank " + std::to_string(ranks_[i]) + " is not one of the " +
                  std::to_string(world_size) + " ranks of the communicator");
    if (std::count(ranks_.begin(), ranks_.end(), ranks_[i]) > 1)
      throw Error("group: rank " + std::to_string(ranks_[i]) + " is named twice");
    if (ranks_[i] == communicator_->rank()) rank_ = static_cast<int>(i);
  }
  if (rank_ < 0)
    throw Error("group: this process, rank " + std::to_string(communicator_->rank()) +
                ", is not a member");
}

std::uint64_t Group::next_tag() {
  constexpr std::uint64_t operation_mask = (1ULL << kGroupIdShift) - 1;
  return first_tag_ | (issued_.fetch_add(1) & operation_mask);
}

}  // namespace dicomm
