#include "device_memory.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

namespace dicomm {

namespace {

struct DeviceMemory {
  std::mutex mutex;
  std::map<std::uint64_t, std::uint64_t> bytes_at;  // by address
  std::vector<std::weak_ptr<Communicator>> communicators;
};

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();  // never destroyed: allocators may outlive every static
  return *memory;
}

// An allocator cannot do anything about an error: without a registration messages are slower.
template <class F>
void for_each_communicator(DeviceMemory& memory, F&& function) {
  std::erase_if(memory.communicators, [](const auto& other) { return other.expired(); });
  for (const auto& weak : memory.communicators) {
    const auto communicator = weak.lock();
    if (!communicator) continue;
    try {
      function(*communicator);
    } catch (const Error& error) {
      TORCH_WARN_ONCE("dicomm: chip memory is registered anew for each message: ", error.what());
    }
  }
}

MemoryRegion region(std::uint64_t address, std::uint64_t bytes) {
  MemoryRegion region;
  region.address = address;
  region.bytes = bytes;
  return region;
}

}  // namespace

void share_device_memory(const std::shared_ptr<Communicator>& communicator) {
  DeviceMemory& memory = device_memory();
  std::lock_guard lock(memory.mutex);
  for (const auto& [address, bytes] : memory.bytes_at)
    communicator->declare_memory(region(address, bytes));
  memory.communicators.push_back(communicator);
}

}  // namespace dicomm

void dicomm_memory_taken(std::int32_t, std::uint64_t address, std::uint64_t bytes) {
  auto& memory = dicomm::device_memory();
  std::lock_guard lock(memory.mutex);
  memory.bytes_at[address] = bytes;
  dicomm::for_each_communicator(memory, [&](dicomm::Communicator& communicator) {
    communicator.declare_memory(dicomm::region(address, bytes));
  });
}

void dicomm_memory_returned(std::int32_t, std::uint64_t address, std::uint64_t bytes) {
  auto& memory = dicomm::device_memory();
  std::lock_guard lock(memory.mutex);
  if (memory.bytes_at.erase(address) == 0) return;
  dicomm::for_each_communicator(memory, [&](dicomm::Communicator& communicator) {
    communicator.forget_memory(address, bytes);
  });
}
