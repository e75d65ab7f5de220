#include "runtime/copy.h"

#include <cstring>

#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

void copy(c10::DeviceIndex device, void* destination, const void* source, size_t bytes,
          ditorch_copy_kind kind) {
  if (bytes == 0) return;
  check(vendor().runtime->memory_copy(device, current_handle(device), destination, source, bytes,
                                      kind),
        "copy memory");
}

}  // namespace

void copy_to_chip(c10::DeviceIndex device, void* destination, const void* source, size_t bytes) {
  copy(device, destination, source, bytes, DITORCH_COPY_HOST_TO_DEVICE);
}

void copy_to_host(c10::DeviceIndex device, void* destination, const void* source, size_t bytes,
                  bool non_blocking) {
  if (bytes == 0) return;
  copy(device, destination, source, bytes, DITORCH_COPY_DEVICE_TO_HOST);
  if (non_blocking) return;
  check(vendor().runtime->stream_synchronize(device, current_handle(device)),
        "synchronize a stream");
}

void copy_on_chip(c10::DeviceIndex device, void* destination, const void* source, size_t bytes) {
  if (bytes == 0) return;
  if (host_reaches(device)) {
    std::memcpy(destination, source, bytes);
    return;
  }
  copy(device, destination, source, bytes, DITORCH_COPY_DEVICE_TO_DEVICE);
}

}  // namespace ditorch
