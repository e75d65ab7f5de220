// The event entries of the runtime table.
#pragma once

#include "runtime.h"

namespace opencl {

ditorch_status event_create(int32_t device, int32_t timed, ditorch_event** event);
ditorch_status event_destroy(int32_t device, ditorch_event* event);
ditorch_status event_record(int32_t device, ditorch_event* event, ditorch_stream* stream);
ditorch_status event_query(int32_t device, ditorch_event* event);
ditorch_status event_synchronize(int32_t device, ditorch_event* event);
ditorch_status stream_wait_event(int32_t device, ditorch_stream* stream, ditorch_event* event);
ditorch_status event_elapsed_ns(int32_t device, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns);

}  // namespace opencl
