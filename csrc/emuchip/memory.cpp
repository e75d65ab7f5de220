// The device's memory: host memory, but no more of it than the chip has.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "clock.h"
#include "device.h"
#include "error.h"
#include "runtime_entries.h"

namespace emuchip {
namespace {

constexpr size_t kAlignment_bytes = 64;  // a cache line, and the widest vector register

}  // namespace

ditorch_status memory_allocate(int32_t device, size_t bytes, void** pointer) {
  *pointer = nullptr;
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (bytes == 0) return DITORCH_OK;
  const ChipFile& chip = found->chip;
  const std::lock_guard lock(found->mutex);
  const size_t free_bytes = static_cast<size_t>(chip.capacity_bytes - found->used_bytes);
  const size_t padding = (kAlignment_bytes - bytes % kAlignment_bytes) % kAlignment_bytes;
  if (bytes > free_bytes || padding > free_bytes - bytes) {
    return fail(DITORCH_OUT_OF_MEMORY,
                "chip %s device %d is out of memory: %zu bytes requested, %zu free of %zd",
                chip.chip_type.c_str(), device, bytes, free_bytes,
                static_cast<ssize_t>(chip.capacity_bytes));
  }
  *pointer = std::aligned_alloc(kAlignment_bytes, bytes + padding);
  if (!*pointer) {
    return fail(DITORCH_OUT_OF_MEMORY,
                "chip %s device %d: the host has no %zu bytes for the emulated memory",
                chip.chip_type.c_str(), device, bytes);
  }
  found->allocated_bytes[*pointer] = static_cast<int64_t>(bytes + padding);
  found->used_bytes += static_cast<int64_t>(bytes + padding);
  return DITORCH_OK;
}

ditorch_status memory_free(int32_t device, void* pointer) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (!pointer) return DITORCH_OK;
  const std::lock_guard lock(found->mutex);
  const auto allocation = found->allocated_bytes.find(pointer);
  if (allocation == found->allocated_bytes.end()) {
    return fail(DITORCH_INVALID, "memory_free: %p was not allocated on device %d", pointer, device);
  }
  found->used_bytes -= allocation->second;
  found->allocated_bytes.erase(allocation);
  std::free(pointer);
  return DITORCH_OK;
}

ditorch_status memory_info(int32_t device, size_t* free_bytes, size_t* total_bytes) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  *free_bytes = static_cast<size_t>(found->chip.capacity_bytes - found->used_bytes);
  *total_bytes = static_cast<size_t>(found->chip.capacity_bytes);
  return DITORCH_OK;
}

ditorch_status memory_copy(int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (bytes > 0 && (!destination || !source)) {
    return fail(DITORCH_INVALID, "memory_copy: %zu bytes from %p to %p", bytes, source,
                destination);
  }
  const int64_t begin_ns = now_ns();
  if (bytes > 0) std::memmove(destination, source, bytes);
  // A copy inside the device reads and writes its memory; the others cross the link to the host.
  const ChipFile& chip = found->chip;
  const double copy_s = kind == DITORCH_COPY_DEVICE_TO_DEVICE
                            ? 2.0 * static_cast<double>(bytes) / chip.bandwidth_bytes_per_s
                            : static_cast<double>(bytes) / chip.host_bytes_per_s;
  const std::lock_guard lock(found->mutex);
  found->submit(found->stream(stream), begin_ns, chip.launch_s + copy_s);
  return DITORCH_OK;
}

// The memory is the host's, so a NIC registers it as such.
ditorch_status memory_peer_handle(int32_t device, void* pointer, size_t bytes,
                                  ditorch_peer_handle* handle) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (handle->struct_size < sizeof *handle) {
    return fail(DITORCH_INVALID, "memory_peer_handle: struct_size is %zu, expected at least %zu",
                handle->struct_size, sizeof *handle);
  }
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard lock(found->mutex);
  for (const auto& [start, allocated_bytes] : found->allocated_bytes) {
    const auto first = reinterpret_cast<uintptr_t>(start);
    const auto size_bytes = static_cast<size_t>(allocated_bytes);
    if (address < first || address - first > size_bytes) continue;
    if (bytes > size_bytes - (address - first)) continue;
    handle->kind = DITORCH_PEER_HOST_POINTER;
    handle->fd = -1;
    handle->pointer = pointer;
    handle->offset_bytes = 0;
    return DITORCH_OK;
  }
  return fail(DITORCH_INVALID, "memory_peer_handle: %zu bytes at %p are not memory of device %d",
              bytes, pointer, device);
}

}  // namespace emuchip
