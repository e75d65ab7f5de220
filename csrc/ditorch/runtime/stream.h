// Current device and stream of the calling thread, and torch's streams as the vendor's.
#pragma once

#include <c10/core/Stream.h>

#include "runtime/vendor.h"

namespace ditorch {

c10::DeviceIndex current_device() noexcept;
c10::DeviceIndex exchange_device(c10::DeviceIndex device);  // returns the previous one

c10::Stream default_stream(c10::DeviceIndex device);
// The next of the device's streams of that priority; 32 of them take turns.
c10::Stream pool_stream(c10::DeviceIndex device, int priority);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);  // returns the previous one

// The vendor's stream behind a torch stream; null is the device's default stream.
ditorch_stream* handle_of(c10::Stream stream);

inline ditorch_stream* current_handle(c10::DeviceIndex device) {
  return handle_of(current_stream(device));
}

}  // namespace ditorch
