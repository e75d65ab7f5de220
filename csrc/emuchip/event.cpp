// Events: marks in a stream that the host and other streams can wait for.
#include <algorithm>

#include "clock.h"
#include "device.h"
#include "error.h"
#include "runtime_entries.h"

namespace emuchip {

ditorch_status event_create(int32_t device, int32_t timed, ditorch_event** event) {
  *event = nullptr;
  if (!find_device(device)) return DITORCH_INVALID;
  *event = new ditorch_event{.timed = timed != 0};
  return DITORCH_OK;
}

ditorch_status event_destroy(int32_t device, ditorch_event* event) {
  if (!find_device(device)) return DITORCH_INVALID;
  delete event;
  return DITORCH_OK;
}

ditorch_status event_record(int32_t device, ditorch_event* event, ditorch_stream* stream) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  event->recorded = true;
  event->ready_at_ns = found->stream(stream).ready_at_ns;
  event->stamped_at_ns = std::max(event->ready_at_ns, now_ns());
  return DITORCH_OK;
}

ditorch_status event_query(int32_t device, ditorch_event* event) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  return event->ready_at_ns <= now_ns() ? DITORCH_OK : DITORCH_NOT_READY;
}

ditorch_status event_synchronize(int32_t device, ditorch_event* event) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  int64_t moment_ns = 0;
  {
    const std::lock_guard lock(found->mutex);
    moment_ns = event->ready_at_ns;
  }
  hold_host_until(*found, moment_ns);
  return DITORCH_OK;
}

ditorch_status stream_wait_event(int32_t device, ditorch_stream* stream, ditorch_event* event) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  found->wait_until(found->stream(stream), event->ready_at_ns);
  return DITORCH_OK;
}

ditorch_status event_elapsed_ns(int32_t device, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  for (const ditorch_event* event : {start, end}) {
    if (!event->timed) return fail(DITORCH_INVALID, "event_elapsed_ns: an event is not timed");
    if (!event->recorded) {
      return fail(DITORCH_INVALID, "event_elapsed_ns: an event has not been recorded");
    }
    if (event->ready_at_ns > now_ns()) {
      return fail(DITORCH_NOT_READY, "event_elapsed_ns: an event has not happened yet");
    }
  }
  *elapsed_ns = end->stamped_at_ns - start->stamped_at_ns;
  return DITORCH_OK;
}

}  // namespace emuchip
