// The runtime table, as ditorch asks a vendor's library for it.
#include "runtime.h"

#include <cstdio>

#include "chip.h"
#include "error.h"
#include "runtime_entries.h"

namespace emuchip {

ditorch_status device_count(int32_t* count) {
  *count = count_devices();
  if (*count >= 0) return DITORCH_OK;
  *count = 0;
  return DITORCH_ERROR;
}

ditorch_status device_properties(int32_t device, ditorch_device_properties* properties) {
  const Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (properties->struct_size < sizeof *properties) {
    return fail(DITORCH_INVALID, "device_properties: struct_size is %zu, expected at least %zu",
                properties->struct_size, sizeof *properties);
  }
  const ChipFile& chip = found->chip;
  std::snprintf(properties->vendor, sizeof properties->vendor, "%s", chip.vendor.c_str());
  std::snprintf(properties->chip_type, sizeof properties->chip_type, "%s", chip.chip_type.c_str());
  std::snprintf(properties->library, sizeof properties->library, "emuchip");
  properties->memory_bytes = static_cast<uint64_t>(chip.capacity_bytes);
  properties->host_accessible = 1;
  properties->nic_accessible = 1;
  return DITORCH_OK;
}

namespace {

constexpr ditorch_runtime kRuntime = {
    .abi_version = DITORCH_RUNTIME_ABI_VERSION,
    .struct_size = sizeof(ditorch_runtime),
    .last_error = last_error,
    .device_count = device_count,
    .device_properties = device_properties,
    .device_synchronize = device_synchronize,
    .memory_allocate = memory_allocate,
    .memory_free = memory_free,
    .memory_info = memory_info,
    .memory_copy = memory_copy,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_query = stream_query,
    .stream_synchronize = stream_synchronize,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .stream_wait_event = stream_wait_event,
    .event_elapsed_ns = event_elapsed_ns,
    .work_begin = work_begin,
    .work_end = work_end,
    .stream_ready_at_ns = stream_ready_at_ns,
    .stream_wait_until_ns = stream_wait_until_ns,
    .pacing = pacing,
    .pacing_reset = pacing_reset,
    .memory_peer_handle = memory_peer_handle,
    .work_span_ns = work_span_ns,
    .memory_export = nullptr,  // links are paced by what passes through dicomm
    .memory_import = nullptr,
    .memory_import_release = nullptr,
};

}  // namespace
}  // namespace emuchip

extern "C" [[gnu::visibility("default")]] const ditorch_runtime* ditorch_vendor_runtime(
    uint32_t abi_version) {
  return abi_version == DITORCH_RUNTIME_ABI_VERSION ? &emuchip::kRuntime : nullptr;
}
