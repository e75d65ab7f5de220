/* What the files of this library share. */
#ifndef CHIP_H
#define CHIP_H

#include "runtime.h"

#define CHIP_DEVICES 1
#define CHIP_MEMORY_BYTES ((size_t)256 << 20)

/* Keeps a sentence (printf style) for last_error and hands `status` back. */
ditorch_status fail(ditorch_status status, const char* format, ...);
const char* last_error(void);

/* DITORCH_OK if this process has such a device. */
ditorch_status check_device(int32_t device);

/* memory.c */
ditorch_status memory_allocate(int32_t device, size_t bytes, void** pointer);
ditorch_status memory_free(int32_t device, void* pointer);
ditorch_status memory_info(int32_t device, size_t* free_bytes, size_t* total_bytes);
ditorch_status memory_copy(int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind);

/* Where the bytes behind a device pointer lie. REPLACE: only this skeleton, whose chip is the host
 * itself, can ask that; it goes when the last kernel runs on the chip. */
void* chip_bytes(const void* device_pointer);

/* streams.c */
ditorch_status device_synchronize(int32_t device);
ditorch_status stream_create(int32_t device, int32_t priority, ditorch_stream** stream);
ditorch_status stream_destroy(int32_t device, ditorch_stream* stream);
ditorch_status stream_query(int32_t device, ditorch_stream* stream);
ditorch_status stream_synchronize(int32_t device, ditorch_stream* stream);

/* events.c */
ditorch_status event_create(int32_t device, int32_t timed, ditorch_event** event);
ditorch_status event_destroy(int32_t device, ditorch_event* event);
ditorch_status event_record(int32_t device, ditorch_event* event, ditorch_stream* stream);
ditorch_status event_query(int32_t device, ditorch_event* event);
ditorch_status event_synchronize(int32_t device, ditorch_event* event);
ditorch_status stream_wait_event(int32_t device, ditorch_stream* stream, ditorch_event* event);
ditorch_status event_elapsed_ns(int32_t device, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns);

#endif
