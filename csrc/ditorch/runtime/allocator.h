// The chip's memory as a c10::DeviceAllocator: caching, with the statistics torch.accelerator
// reports, and torch.OutOfMemoryError when the chip is full.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace ditorch {

// Makes the allocator torch's allocator for the device.
void register_allocator();

c10::Allocator* chip_allocator();

// `bytes` of memory of chip `device`; throws torch.OutOfMemoryError.
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

// Whether `pointer` owns memory that came from allocate_on.
bool owns_chip_memory(const c10::DataPtr& pointer);

// While one lives, this thread's CPU tensors are allocated in the memory of chip `device`, so
// that what a host kernel returns already lies on the chip.
class AllocateOnChip {
 public:
  explicit AllocateOnChip(c10::DeviceIndex device);
  ~AllocateOnChip();
  AllocateOnChip(const AllocateOnChip&) = delete;
  AllocateOnChip& operator=(const AllocateOnChip&) = delete;

 private:
  c10::DeviceIndex previous_;
};

}  // namespace ditorch
