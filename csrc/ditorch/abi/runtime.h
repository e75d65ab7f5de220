/* The runtime ABI: what a chip's vendor implements so that ditorch can drive the chip.
 *
 * Plain C, no torch types, no C++ types. A vendor's shared library exports one symbol,
 * `ditorch_vendor_runtime`, which returns a table of functions. Tables only ever grow at the
 * end: a reader compares `struct_size` before it touches a later member.
 *
 * Units are in the names: _bytes, _ns. Every function returns a ditorch_status; on failure
 * `last_error` gives one sentence about the calling thread's last failure.
 *
 * Work is ordered by stream. Functions that take a stream return as soon as the work is
 * submitted; the host is held only by the *_synchronize functions.
 */
#ifndef DITORCH_ABI_RUNTIME_H
#define DITORCH_ABI_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DITORCH_RUNTIME_ABI_VERSION 1u

typedef enum ditorch_status {
  DITORCH_OK = 0,
  DITORCH_ERROR = 1,           /* see last_error */
  DITORCH_OUT_OF_MEMORY = 2,   /* the chip's memory is full */
  DITORCH_NOT_IMPLEMENTED = 3, /* operators only: ditorch runs the host's kernel and counts it */
  DITORCH_NOT_READY = 4,       /* queries only: the work has not finished */
  DITORCH_INVALID = 5          /* the arguments make no sense; see last_error */
} ditorch_status;

typedef struct ditorch_stream ditorch_stream; /* NULL is the device's default stream */
typedef struct ditorch_event ditorch_event;

typedef enum ditorch_copy_kind {
  DITORCH_COPY_HOST_TO_DEVICE = 0,
  DITORCH_COPY_DEVICE_TO_HOST = 1,
  DITORCH_COPY_DEVICE_TO_DEVICE = 2
} ditorch_copy_kind;

typedef struct ditorch_device_properties {
  size_t struct_size;
  char vendor[64];         /* for example "B" */
  char chip_type[64];      /* for example "B" */
  char library[64];        /* the honest device type torch shows, for example "emuchip" */
  uint64_t memory_bytes;   /* capacity */
  int32_t host_accessible; /* 1: device pointers can be read and written by the host */
  int32_t nic_accessible;  /* 1: a NIC may read and write device memory (device-direct) */
} ditorch_device_properties;

typedef enum ditorch_dtype {
  DITORCH_FLOAT32 = 0,
  DITORCH_FLOAT64 = 1,
  DITORCH_FLOAT16 = 2,
  DITORCH_BFLOAT16 = 3,
  DITORCH_INT8 = 4,
  DITORCH_INT16 = 5,
  DITORCH_INT32 = 6,
  DITORCH_INT64 = 7,
  DITORCH_UINT8 = 8,
  DITORCH_BOOL = 9,
  DITORCH_COMPLEX64 = 10,
  DITORCH_COMPLEX128 = 11,
  DITORCH_OTHER = 12
} ditorch_dtype;

/* What a kernel cost. Vendors with real hardware ignore it; an emulated chip is paced by it.
 *
 * The charging rule, the same here and in heteropp's cost model, for one ATen operator:
 *   bytes = bytes of every distinct tensor argument and result, each counted once;
 *   flops = 2*m*n*k for products of matrices (per batch), else one per element of the largest
 *           tensor among arguments and results; zero for views, which are not launched at all. */
typedef struct ditorch_work {
  size_t struct_size;
  const char* name; /* the operator's name, for traces; lives as long as the process */
  double flops;
  double bytes;
  ditorch_dtype dtype;   /* the compute dtype: selects the peak */
  int32_t host_fallback; /* 1 if the host computed it because the vendor has no kernel */
} ditorch_work;

typedef struct ditorch_pacing {
  size_t struct_size;
  double elapsed_s; /* emulated time since the last reset */
  double busy_s;    /* time in which the stream had work */
  double lost_s;    /* emulated time added because the host was slower than the chip */
} ditorch_pacing;

typedef struct ditorch_runtime {
  uint32_t abi_version; /* DITORCH_RUNTIME_ABI_VERSION */
  size_t struct_size;

  const char* (*last_error)(void);

  /* devices: the ones this process may use, numbered from 0 */
  ditorch_status (*device_count)(int32_t* count);
  ditorch_status (*device_properties)(int32_t device, ditorch_device_properties* properties);
  ditorch_status (*device_synchronize)(int32_t device);

  /* memory */
  ditorch_status (*memory_allocate)(int32_t device, size_t bytes, void** pointer);
  ditorch_status (*memory_free)(int32_t device, void* pointer);
  ditorch_status (*memory_info)(int32_t device, size_t* free_bytes, size_t* total_bytes);
  ditorch_status (*memory_copy)(int32_t device, ditorch_stream* stream, void* destination,
                                const void* source, size_t bytes, ditorch_copy_kind kind);

  /* streams */
  ditorch_status (*stream_create)(int32_t device, int32_t priority, ditorch_stream** stream);
  ditorch_status (*stream_destroy)(int32_t device, ditorch_stream* stream);
  ditorch_status (*stream_query)(int32_t device, ditorch_stream* stream);
  ditorch_status (*stream_synchronize)(int32_t device, ditorch_stream* stream);

  /* events */
  ditorch_status (*event_create)(int32_t device, int32_t timed, ditorch_event** event);
  ditorch_status (*event_destroy)(int32_t device, ditorch_event* event);
  ditorch_status (*event_record)(int32_t device, ditorch_event* event, ditorch_stream* stream);
  ditorch_status (*event_query)(int32_t device, ditorch_event* event);
  ditorch_status (*event_synchronize)(int32_t device, ditorch_event* event);
  ditorch_status (*stream_wait_event)(int32_t device, ditorch_stream* stream, ditorch_event* event);
  ditorch_status (*event_elapsed_ns)(int32_t device, ditorch_event* start, ditorch_event* end,
                                     int64_t* elapsed_ns);

  /* Brackets around a kernel. ditorch calls work_begin before an operator and work_end after it,
   * whether the vendor's kernel or the host's computed it. Real hardware leaves both NULL. */
  ditorch_status (*work_begin)(int32_t device, ditorch_stream* stream);
  ditorch_status (*work_end)(int32_t device, ditorch_stream* stream, const ditorch_work* work);

  /* The clock of a chip that knows in advance when its work will be done (an emulated one), in
   * CLOCK_MONOTONIC nanoseconds. Real hardware leaves these NULL; transports then use events. */
  ditorch_status (*stream_ready_at_ns)(int32_t device, ditorch_stream* stream,
                                       int64_t* ready_at_ns);
  ditorch_status (*stream_wait_until_ns)(int32_t device, ditorch_stream* stream, int64_t until_ns);
  ditorch_status (*pacing)(int32_t device, ditorch_pacing* pacing);
  ditorch_status (*pacing_reset)(int32_t device);
} ditorch_runtime;

/* Returns NULL when the library does not speak `abi_version`. */
const ditorch_runtime* ditorch_vendor_runtime(uint32_t abi_version);
typedef const ditorch_runtime* (*ditorch_vendor_runtime_fn)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
#endif
