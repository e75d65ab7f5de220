// The runtime table, as ditorch asks a vendor's library for it.
#include "runtime.h"

#include <cstdio>

#include "event.h"
#include "memory.h"
#include "stream.h"

namespace opencl {
namespace {

ditorch_status device_count(int32_t* count) {
  return guarded([&] {
    *count = static_cast<int32_t>(devices().size());
    return DITORCH_OK;
  });
}

ditorch_status device_properties(int32_t index, ditorch_device_properties* properties) {
  return guarded([&] {
    const Device& device = device_at(index);
    std::snprintf(properties->vendor, sizeof properties->vendor, "%s", device.maker.c_str());
    std::snprintf(properties->chip_type, sizeof properties->chip_type, "%s", device.name.c_str());
    // torch has given "opencl" to a device of its own.
    std::snprintf(properties->library, sizeof properties->library, "ocl");
    properties->memory_bytes = device.memory_bytes;
    properties->host_accessible = 0;
    properties->nic_accessible = 0;
    return DITORCH_OK;
  });
}

ditorch_status device_synchronize(int32_t index) {
  return guarded([&] {
    device_at(index).streams->synchronize_all();
    return DITORCH_OK;
  });
}

ditorch_status memory_allocate(int32_t index, size_t bytes, void** pointer) {
  return guarded([&] {
    *pointer = device_at(index).memory->allocate(bytes);
    return DITORCH_OK;
  });
}

ditorch_status memory_free(int32_t index, void* pointer) {
  return guarded([&] {
    device_at(index).memory->free(pointer);
    return DITORCH_OK;
  });
}

ditorch_status memory_info(int32_t index, size_t* free_bytes, size_t* total_bytes) {
  return guarded([&] {
    *free_bytes = device_at(index).memory->free_bytes();
    *total_bytes = device_at(index).memory_bytes;
    return DITORCH_OK;
  });
}

ditorch_status memory_copy(int32_t index, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind) {
  return guarded([&] {
    if (bytes == 0) return DITORCH_OK;
    Submission submission(device_at(index).streams->of(stream));
    if (kind == DITORCH_COPY_HOST_TO_DEVICE) {
      submission.copy_from_host(destination, source, bytes);
    } else {
      submission.copy(destination, source, bytes, false);
    }
    return DITORCH_OK;
  });
}

ditorch_status stream_create(int32_t index, int32_t, ditorch_stream** stream) {
  return guarded([&] {
    *stream = device_at(index).streams->create();
    return DITORCH_OK;
  });
}

ditorch_status stream_destroy(int32_t index, ditorch_stream* stream) {
  return guarded([&] {
    device_at(index).streams->destroy(stream);
    return DITORCH_OK;
  });
}

ditorch_status stream_query(int32_t index, ditorch_stream* stream) {
  return guarded([&] {
    return device_at(index).streams->of(stream).is_idle() ? DITORCH_OK : DITORCH_NOT_READY;
  });
}

ditorch_status stream_synchronize(int32_t index, ditorch_stream* stream) {
  return guarded([&] {
    device_at(index).streams->of(stream).synchronize();
    return DITORCH_OK;
  });
}

// Operators submit their work themselves; the brackets are there for the profiler's times.
ditorch_status work_begin(int32_t, ditorch_stream*) {
  begin_span();
  return DITORCH_OK;
}

ditorch_status work_end(int32_t, ditorch_stream*, const ditorch_work*) { return DITORCH_OK; }

ditorch_status work_span_ns(int32_t index, int64_t* begin_ns, int64_t* end_ns) {
  return guarded([&] {
    std::tie(*begin_ns, *end_ns) = span_ns(device_at(index));
    return DITORCH_OK;
  });
}

ditorch_runtime runtime_table() {
  ditorch_runtime runtime{};
  runtime.abi_version = DITORCH_RUNTIME_ABI_VERSION;
  runtime.struct_size = sizeof runtime;
  runtime.last_error = last_error;
  runtime.device_count = device_count;
  runtime.device_properties = device_properties;
  runtime.device_synchronize = device_synchronize;
  runtime.memory_allocate = memory_allocate;
  runtime.memory_free = memory_free;
  runtime.memory_info = memory_info;
  runtime.memory_copy = memory_copy;
  runtime.stream_create = stream_create;
  runtime.stream_destroy = stream_destroy;
  runtime.stream_query = stream_query;
  runtime.stream_synchronize = stream_synchronize;
  runtime.event_create = event_create;
  runtime.event_destroy = event_destroy;
  runtime.event_record = event_record;
  runtime.event_query = event_query;
  runtime.event_synchronize = event_synchronize;
  runtime.stream_wait_event = stream_wait_event;
  runtime.event_elapsed_ns = event_elapsed_ns;
  runtime.work_begin = work_begin;
  runtime.work_end = work_end;
  runtime.work_span_ns = work_span_ns;
  return runtime;
}

}  // namespace
}  // namespace opencl

extern "C" [[gnu::visibility("default")]] const ditorch_runtime* ditorch_vendor_runtime(
    uint32_t abi_version) {
  static const ditorch_runtime runtime = opencl::runtime_table();
  return abi_version == DITORCH_RUNTIME_ABI_VERSION ? &runtime : nullptr;
}
