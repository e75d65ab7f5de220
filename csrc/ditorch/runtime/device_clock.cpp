#include "runtime/device_clock.h"

#include "runtime/stream.h"
#include "runtime/vendor.h"

// These cross a C boundary, so a chip that fails to answer gives 0: nothing to wait for.

int64_t ditorch_ready_at_ns(int32_t device_index) {
  int64_t moment_ns = 0;
  auto stream = ditorch::current_handle(static_cast<c10::DeviceIndex>(device_index));
  ditorch::vendor().runtime->stream_ready_at_ns(device_index, stream, &moment_ns);
  return moment_ns;
}

void ditorch_wait_until_ns(int32_t device_index, int64_t moment_ns) {
  auto stream = ditorch::current_handle(static_cast<c10::DeviceIndex>(device_index));
  ditorch::vendor().runtime->stream_wait_until_ns(device_index, stream, moment_ns);
}
