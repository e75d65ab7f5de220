// Registered memory for the slots of all connections.
//
// It grows by a block where no slot is free: it holds as many as were in use at one time, not as
// many as each connection may use. The slot that came back last is taken first, so that the
// processor's cache holds those that are in use.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "transport/verbs/device.h"

namespace dicomm::verbs {

struct Slot {
  std::byte* data = nullptr;
  const Registration* registration = nullptr;  // of its block

  std::uint32_t lkey(std::size_t device) const { return registration->on(device)->lkey; }
};

// From any thread.
class SlotPool {
 public:
  SlotPool(std::vector<std::shared_ptr<Device>> devices, std::size_t slot_bytes);
  ~SlotPool();

  Slot take();  // throws Error
  void give_back(const Slot& slot);

 private:
  class Block;

  void grow();

  const std::vector<std::shared_ptr<Device>> devices_;
  const std::size_t slot_bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Slot> free_;
};

}  // namespace dicomm::verbs
