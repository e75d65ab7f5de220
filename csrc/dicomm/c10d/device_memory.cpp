#include "device_memory.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

#include "chip_memory.h"

namespace dicomm {

namespace {

struct DeviceMemory {
  std::mutex mutex;
  struct Segment {
    std::int32_t device;
    std::uint64_t bytes;
  };
  std::map<std::uint64_t, Segment> segments;  // by address
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

MemoryRegion region(std::int32_t device, std::uint64_t address, std::uint64_t bytes) {
  return {address, bytes, [device](std::uint64_t piece, std::uint64_t length) {
            return export_chip_dmabuf(static_cast<c10::DeviceIndex>(device), piece, length);
          }};
}

}  // namespace

void share_device_memory(const std::shared_ptr<Communicator>& communicator) {
  DeviceMemory& memory = device_memory();
  std::lock_guard lock(memory.mutex);
  for (const auto& [address, segment] : memory.segments)
    communicator->declare_memory(region(segment.device, address, segment.bytes));
  memory.communicators.push_back(communicator);
}

}  // namespace dicomm

void dicomm_memory_taken(std::int32_t device, std::uint64_t address, std::uint64_t bytes) {
  auto& memory = dicomm::device_memory();
  std::lock_guard lock(memory.mutex);
  memory.segments[address] = {device, bytes};
  dicomm::for_each_communicator(memory, [&](dicomm::Communicator& communicator) {
    communicator.declare_memory(dicomm::region(device, address, bytes));
  });
}

void dicomm_memory_returned(std::int32_t, std::uint64_t address, std::uint64_t bytes) {
  auto& memory = dicomm::device_memory();
  std::lock_guard lock(memory.mutex);
  if (memory.segments.erase(address) == 0) return;
  dicomm::for_each_communicator(memory, [&](dicomm::Communicator& communicator) {
    communicator.forget_memory(address, bytes);
  });
}
