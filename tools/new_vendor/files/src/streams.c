/* Streams. Here work is done as it is submitted, so a stream is never behind. */
#include <stdlib.h>

#include "chip.h"

/* REPLACE: keep your driver's stream in it. */
struct ditorch_stream {
  int32_t priority;
};

/* REPLACE by your driver's wait for the whole device. */
ditorch_status device_synchronize(int32_t device) { return check_device(device); }

/* REPLACE by your driver's creation of a stream. */
ditorch_status stream_create(int32_t device, int32_t priority, ditorch_stream** stream) {
  *stream = NULL;
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK) return status;
  *stream = malloc(sizeof **stream);
  if (!*stream) return fail(DITORCH_ERROR, "the host has no memory for a stream");
  (*stream)->priority = priority;
  return DITORCH_OK;
}

/* REPLACE by your driver's. */
ditorch_status stream_destroy(int32_t device, ditorch_stream* stream) {
  free(stream);
  return check_device(device);
}

/* REPLACE by your driver's query: DITORCH_NOT_READY while there is work. */
ditorch_status stream_query(int32_t device, ditorch_stream* stream) {
  (void)stream;
  return check_device(device);
}

/* REPLACE by your driver's wait for a stream. */
ditorch_status stream_synchronize(int32_t device, ditorch_stream* stream) {
  (void)stream;
  return check_device(device);
}
