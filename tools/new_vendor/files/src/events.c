/* Events. Here an event has happened as soon as it is recorded; it keeps the time of that. */
#include <stdlib.h>
#include <time.h>

#include "chip.h"

/* REPLACE: keep your driver's event in it. */
struct ditorch_event {
  int32_t timed;
  int32_t recorded;
  int64_t happened_at_ns;
};

/* REPLACE by your driver's creation of an event, with timing if `timed`. */
ditorch_status event_create(int32_t device, int32_t timed, ditorch_event** event) {
  *event = NULL;
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK) return status;
  *event = calloc(1, sizeof **event);
  if (!*event) return fail(DITORCH_ERROR, "the host has no memory for an event");
  (*event)->timed = timed;
  return DITORCH_OK;
}

/* REPLACE by your driver's. */
ditorch_status event_destroy(int32_t device, ditorch_event* event) {
  free(event);
  return check_device(device);
}

/* REPLACE by your driver's recording of the event on the stream. */
ditorch_status event_record(int32_t device, ditorch_event* event, ditorch_stream* stream) {
  (void)stream;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->happened_at_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
  event->recorded = 1;
  return check_device(device);
}

/* REPLACE by your driver's query: DITORCH_NOT_READY until it has happened. */
ditorch_status event_query(int32_t device, ditorch_event* event) {
  (void)event;
  return check_device(device);
}

/* REPLACE by your driver's wait for an event. */
ditorch_status event_synchronize(int32_t device, ditorch_event* event) {
  (void)event;
  return check_device(device);
}

/* REPLACE by your driver's wait of a stream for an event. */
ditorch_status stream_wait_event(int32_t device, ditorch_stream* stream, ditorch_event* event) {
  (void)stream;
  (void)event;
  return check_device(device);
}

/* REPLACE by your driver's measurement; many give milliseconds as a float, this wants ns. */
ditorch_status event_elapsed_ns(int32_t device, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns) {
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK) return status;
  if (!start->timed || !end->timed || !start->recorded || !end->recorded) {
    return fail(DITORCH_INVALID, "both events must be timed and recorded");
  }
  *elapsed_ns = end->happened_at_ns - start->happened_at_ns;
  return DITORCH_OK;
}
