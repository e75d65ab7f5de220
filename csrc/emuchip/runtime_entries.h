// The functions of the runtime table, one group a file. What they do is said in the ABI.
#pragma once

#include "runtime.h"

namespace emuchip {

// runtime.cpp
ditorch_status device_count(int32_t* count);
ditorch_status device_properties(int32_t device, ditorch_device_properties* properties);

// memory.cpp
ditorch_status memory_allocate(int32_t device, size_t bytes, void** pointer);
ditorch_status memory_free(int32_t device, void* pointer);
ditorch_status memory_info(int32_t device, size_t* free_bytes, size_t* total_bytes);
ditorch_status memory_copy(int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind);
ditorch_status memory_peer_handle(int32_t device, void* pointer, size_t bytes,
                                  ditorch_peer_handle* handle);

// stream.cpp
ditorch_status device_synchronize(int32_t device);
ditorch_status stream_create(int32_t device, int32_t priority, ditorch_stream** stream);
ditorch_status stream_destroy(int32_t device, ditorch_stream* stream);
ditorch_status stream_query(int32_t device, ditorch_stream* stream);
ditorch_status stream_synchronize(int32_t device, ditorch_stream* stream);
ditorch_status stream_ready_at_ns(int32_t device, ditorch_stream* stream, int64_t* ready_at_ns);
ditorch_status stream_wait_until_ns(int32_t device, ditorch_stream* stream, int64_t until_ns);

// event.cpp
ditorch_status event_create(int32_t device, int32_t timed, ditorch_event** event);
ditorch_status event_destroy(int32_t device, ditorch_event* event);
ditorch_status event_record(int32_t device, ditorch_event* event, ditorch_stream* stream);
ditorch_status event_query(int32_t device, ditorch_event* event);
ditorch_status event_synchronize(int32_t device, ditorch_event* event);
ditorch_status stream_wait_event(int32_t device, ditorch_stream* stream, ditorch_event* event);
ditorch_status event_elapsed_ns(int32_t device, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns);

// pacing.cpp
ditorch_status work_begin(int32_t device, ditorch_stream* stream);
ditorch_status work_end(int32_t device, ditorch_stream* stream, const ditorch_work* work);
ditorch_status pacing(int32_t device, ditorch_pacing* pacing);
ditorch_status pacing_reset(int32_t device);
ditorch_status work_span_ns(int32_t device, int64_t* begin_ns, int64_t* end_ns);

}  // namespace emuchip
