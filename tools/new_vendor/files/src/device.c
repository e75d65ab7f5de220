/* Devices, errors, and the runtime table: start reading here. */
#include <stdarg.h>
#include <stdio.h>

#include "chip.h"

static _Thread_local char sentence[512];

ditorch_status fail(ditorch_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error(void) { return sentence; }

ditorch_status check_device(int32_t device) {
  if (device >= 0 && device < CHIP_DEVICES) return DITORCH_OK;
  return fail(DITORCH_INVALID, "there is no device %d, expected 0 to %d", device, CHIP_DEVICES - 1);
}

/* REPLACE by your driver's start and count. */
static ditorch_status device_count(int32_t* count) {
  *count = CHIP_DEVICES;
  return DITORCH_OK;
}

/* REPLACE by what your driver says of the chip. */
static ditorch_status device_properties(int32_t device, ditorch_device_properties* properties) {
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK) return status;
  snprintf(properties->vendor, sizeof properties->vendor, "@NAME@");
  snprintf(properties->chip_type, sizeof properties->chip_type, "@NAME@");
  snprintf(properties->library, sizeof properties->library, "@NAME@");
  properties->memory_bytes = CHIP_MEMORY_BYTES;
  properties->host_accessible = 0; /* the host goes through memory_copy, as on most chips */
  properties->nic_accessible = 0;  /* 1 once memory_peer_handle is there */
  return DITORCH_OK;
}

/* Members that are not named are NULL: what ditorch does then is said in runtime.h. */
static const ditorch_runtime runtime = {
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
};

__attribute__((visibility("default"))) const ditorch_runtime* ditorch_vendor_runtime(
    uint32_t abi_version) {
  return abi_version == DITORCH_RUNTIME_ABI_VERSION ? &runtime : NULL;
}
