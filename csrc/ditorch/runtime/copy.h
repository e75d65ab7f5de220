// Bytes between the host and the chip, on the calling thread's current stream.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace ditorch {

// The source may be freed at once.
void copy_to_chip(c10::DeviceIndex device, void* destination, const void* source, size_t bytes);

// Waits until the bytes are there; if non_blocking, that is left to whoever reads them.
void copy_to_host(c10::DeviceIndex device, void* destination, const void* source, size_t bytes,
                  bool non_blocking = false);

// Within the chip, in stream order; the two do not overlap. Emulated chips are not charged for it:
// it is what a change of size costs, not an operator.
void copy_on_chip(c10::DeviceIndex device, void* destination, const void* source, size_t bytes);

}  // namespace ditorch
