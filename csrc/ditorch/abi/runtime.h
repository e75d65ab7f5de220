/* The runtime ABI: what a chip's vendor implements so that ditorch can drive the chip.
 *
 * A vendor's shared library exports one symbol, `ditorch_vendor_runtime`, which returns a table of
 * functions. Everything is plain C: no torch types, no C++ types. `tools/new-vendor NAME` writes a
 * library that implements all of it over ordinary memory, to be filled in place by place.
 *
 * Versions. `abi_version` changes only if a member changes its meaning. Tables and structures
 * grow at the end and never elsewhere: whoever made one puts its own sizeof into `struct_size`, and
 * whoever reads one takes members beyond that as absent (zero, NULL). A library therefore keeps
 * working with a later ditorch, and with an earlier one as well.
 *
 * Entries. Those under "required" must be there: ditorch refuses a library without them, by name.
 * Those under "optional" may be NULL; each says what ditorch does then.
 *
 * Statuses. Every function returns a ditorch_status. On any other than DITORCH_OK the outputs are
 * not read, and unless it is DITORCH_NOT_READY or DITORCH_NOT_IMPLEMENTED ditorch raises a Python
 * error with the sentence of `last_error`.
 *
 * Threads. ditorch calls every function from any thread, several at once (autograd runs backward in
 * its own threads), on the same device and the same stream too. There is no "current device": each
 * call names its device, and a library over a driver that has one sets it in every call.
 *
 * Streams. Work is ordered by stream: what is submitted to one stream is done in the order of
 * submission, different streams are ordered by events only. NULL is the default stream of the
 * device; it is a stream like any other and orders nothing but itself. Functions that take a stream
 * return as soon as the work is submitted; the host is held by the *_synchronize functions only.
 *
 * Units are in the names: _bytes, _ns, _s.
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
  DITORCH_NOT_IMPLEMENTED = 3, /* the chip has no such thing; each entry says what follows */
  DITORCH_NOT_READY = 4,       /* queries only: the work has not finished */
  DITORCH_INVALID = 5          /* the arguments make no sense; see last_error */
} ditorch_status;

typedef struct ditorch_stream ditorch_stream; /* the vendor's own; NULL is the default stream */
typedef struct ditorch_event ditorch_event;   /* the vendor's own */

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

/* --- devices -------------------------------------------------------------------------------- */

/* Filled by the vendor. ditorch zeroes it and sets struct_size before the call. */
typedef struct ditorch_device_properties {
  size_t struct_size;
  char vendor[64];       /* who makes the chip, for example "B" */
  char chip_type[64];    /* its type, for example "B" */
  char library[64];      /* the device type torch shows, for example "emuchip": lower-case letters,
                          * digits and underscores; none that torch has already, nor "device" */
  uint64_t memory_bytes; /* capacity */
  /* 1: the host reads and writes device memory through the device's own pointers, and finds there
   *    the results of all work submitted so far. Host kernels then run right on device memory.
   * 0: the host must not touch device memory, as on nearly every accelerator. Where the chip has no
   *    kernel, ditorch copies the arguments to the host and the results back, by memory_copy. */
  int32_t host_accessible;
  /* 1: a NIC may read and write device memory (device-direct), see memory_peer_handle. */
  int32_t nic_accessible;
} ditorch_device_properties;

/* --- copies --------------------------------------------------------------------------------- */

typedef enum ditorch_copy_kind {
  DITORCH_COPY_HOST_TO_DEVICE = 0,
  DITORCH_COPY_DEVICE_TO_HOST = 1,
  DITORCH_COPY_DEVICE_TO_DEVICE = 2 /* within one device */
} ditorch_copy_kind;

/* --- peer handles --------------------------------------------------------------------------- */

typedef enum ditorch_peer_kind {
  DITORCH_PEER_HOST_POINTER = 0, /* the NIC's driver registers `pointer`, as host memory or by a
                                  * peer-memory module that knows the chip (ibv_reg_mr) */
  DITORCH_PEER_DMABUF = 1        /* the NIC's driver imports `fd` (ibv_reg_dmabuf_mr) */
} ditorch_peer_kind;

/* How a NIC reaches one piece of device memory. ditorch zeroes it and sets struct_size. */
typedef struct ditorch_peer_handle {
  size_t struct_size;
  int32_t kind;          /* a ditorch_peer_kind */
  int32_t fd;            /* DMABUF: a descriptor of its own for each call; the caller closes it, at
                          * the latest once its registration is done; HOST_POINTER: -1 */
  void* pointer;         /* the address to register; DMABUF: the address within the device */
  uint64_t offset_bytes; /* DMABUF: where the piece begins in the buffer; HOST_POINTER: 0 */
} ditorch_peer_handle;

/* --- memory of other processes ------------------------------------------------------------- */

/* How another process of the same host, with the same library, reaches a piece of device memory:
 * plain bytes, good in any message. Whoever makes one zeroes it and sets struct_size. */
typedef struct ditorch_memory_handle {
  size_t struct_size;
  uint8_t allocation[64]; /* the vendor's own words for the allocation that holds the piece; the
                           * same as long as it lives, and never those of another one */
  uint64_t offset_bytes;  /* where the piece begins in the allocation */
} ditorch_memory_handle;

/* --- launches ------------------------------------------------------------------------------- */

/* What a kernel cost, for a chip that is paced by it (an emulated one).
 *
 * The charging rule, the same here and in heteropp's cost model, for one ATen operator:
 *   bytes = bytes of every distinct tensor argument and result, each counted once;
 *   flops = 2*m*n*k for products of matrices (per batch); for attention in one piece 2 for each
 *           element of the products of every query with every key that it sees (forward: size +
 *           value_size of them, backward: 3 size + 2 value_size), documents being taken to be as
 *           long as the longest, and nothing for what else is done to a score (softmax, soft cap,
 *           dropout); else one per element of the largest tensor among arguments and results;
 *           zero for views, which are not launched at all. */
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

/* --- the table ------------------------------------------------------------------------------ */

typedef struct ditorch_runtime {
  uint32_t abi_version; /* DITORCH_RUNTIME_ABI_VERSION */
  size_t struct_size;   /* sizeof(ditorch_runtime) as the vendor compiled it */

  /* Required. One sentence about the calling thread's last failure: what failed, the values, what
   * was expected. Never NULL; valid until the thread's next call. */
  const char* (*last_error)(void);

  /* Devices. Required. */

  /* How many chips this process may use; they are numbered from 0. Called first, so the driver may
   * be started here. No chip is 0 and DITORCH_OK; a driver that does not answer is an error. */
  ditorch_status (*device_count)(int32_t* count);

  /* Describes one chip. The same answer each time; called once for each device. */
  ditorch_status (*device_properties)(int32_t device, ditorch_device_properties* properties);

  /* Holds the host until all work of all streams of the device is done. */
  ditorch_status (*device_synchronize)(int32_t device);

  /* Memory. Required. ditorch caches and reuses memory by itself, so these need not be fast. */

  /* Memory of the chip, aligned to 64 bytes or better. DITORCH_OUT_OF_MEMORY if it is full: ditorch
   * then gives back what it has cached and asks once more, and raises torch.OutOfMemoryError if
   * that fails too. 0 bytes are NULL and DITORCH_OK. */
  ditorch_status (*memory_allocate)(int32_t device, size_t bytes, void** pointer);

  /* Gives memory back. Work submitted before may still use it, so the vendor waits for that work
   * if its driver does not. NULL is DITORCH_OK; a pointer that memory_allocate did not give is
   * DITORCH_INVALID. */
  ditorch_status (*memory_free)(int32_t device, void* pointer);

  /* What is free now and what the chip has, in bytes. */
  ditorch_status (*memory_info)(int32_t device, size_t* free_bytes, size_t* total_bytes);

  /* Copies `bytes` in stream order. Pointers may point into the middle of an allocation; source and
   * destination do not overlap.
   * Host to device: the source may be changed or freed as soon as the function returns.
   * Device to host: the destination is complete once the stream has been synchronized. */
  ditorch_status (*memory_copy)(int32_t device, ditorch_stream* stream, void* destination,
                                const void* source, size_t bytes, ditorch_copy_kind kind);

  /* Streams. Required. */

  /* A new stream. `priority` follows torch: 0 is normal, lower numbers go first; a chip without
   * priorities ignores it. ditorch keeps streams for the life of the process. */
  ditorch_status (*stream_create)(int32_t device, int32_t priority, ditorch_stream** stream);
  ditorch_status (*stream_destroy)(int32_t device, ditorch_stream* stream);

  /* DITORCH_OK if all its work is done, else DITORCH_NOT_READY; never waits. */
  ditorch_status (*stream_query)(int32_t device, ditorch_stream* stream);

  /* Holds the host until the work submitted to the stream so far is done. */
  ditorch_status (*stream_synchronize)(int32_t device, ditorch_stream* stream);

  /* Events: marks in a stream. Required. One that was never recorded counts as done. */

  /* `timed`: 1 if event_elapsed_ns will be asked of it. */
  ditorch_status (*event_create)(int32_t device, int32_t timed, ditorch_event** event);

  /* May be called before the event has happened; who waits for it still waits. */
  ditorch_status (*event_destroy)(int32_t device, ditorch_event* event);

  /* Marks the work submitted to the stream so far. Recorded again, it is the new mark only. */
  ditorch_status (*event_record)(int32_t device, ditorch_event* event, ditorch_stream* stream);

  /* DITORCH_OK if the marked work is done, else DITORCH_NOT_READY; never waits. */
  ditorch_status (*event_query)(int32_t device, ditorch_event* event);

  /* Holds the host until the marked work is done. */
  ditorch_status (*event_synchronize)(int32_t device, ditorch_event* event);

  /* Work submitted to the stream from now on starts after the marked work; the host is not held. */
  ditorch_status (*stream_wait_event)(int32_t device, ditorch_stream* stream, ditorch_event* event);

  /* Nanoseconds between two timed events, as the chip came to them; negative if `end` came first.
   * DITORCH_NOT_READY if one has not happened yet, DITORCH_INVALID if one is not timed or was never
   * recorded. */
  ditorch_status (*event_elapsed_ns)(int32_t device, ditorch_event* start, ditorch_event* end,
                                     int64_t* elapsed_ns);

  /* Launch brackets. Optional: real hardware leaves both NULL, as the operators submit their work
   * themselves. Else ditorch calls work_begin before each operator and work_end after it, on the
   * thread and stream that run it, whether the vendor's kernel or the host's computed it. */
  ditorch_status (*work_begin)(int32_t device, ditorch_stream* stream);
  ditorch_status (*work_end)(int32_t device, ditorch_stream* stream, const ditorch_work* work);

  /* The clock of a chip that knows in advance when its work will be done (an emulated one), in
   * CLOCK_MONOTONIC nanoseconds. Optional: real hardware leaves these NULL, and transports use
   * events. */

  /* When the work submitted to the stream so far will be done. */
  ditorch_status (*stream_ready_at_ns)(int32_t device, ditorch_stream* stream,
                                       int64_t* ready_at_ns);
  /* Work submitted from now on starts no earlier; the host is not held. */
  ditorch_status (*stream_wait_until_ns)(int32_t device, ditorch_stream* stream, int64_t until_ns);

  /* The account of emulated time. Optional: without it ditorch reports none. */
  ditorch_status (*pacing)(int32_t device, ditorch_pacing* pacing);
  ditorch_status (*pacing_reset)(int32_t device);

  /* How a NIC reaches `bytes` of memory from `pointer` on, which lie in one allocation. Optional:
   * if it is NULL or says DITORCH_NOT_IMPLEMENTED, transports go through host memory. The handle is
   * good until the memory is freed. */
  ditorch_status (*memory_peer_handle)(int32_t device, void* pointer, size_t bytes,
                                       ditorch_peer_handle* handle);

  /* When the chip does the last work that the calling thread ended with work_end, in
   * CLOCK_MONOTONIC nanoseconds, for torch's profiler. Optional: the profiler then shows no kernels
   * of this chip, only the host's side. */
  ditorch_status (*work_span_ns)(int32_t device, int64_t* begin_ns, int64_t* end_ns);

  /* Memory of other processes. Optional: without the three, or where memory_export or memory_import
   * fails, messages between two processes of a host go through the host's memory. */

  /* Describes the memory at `pointer`, which may point into the middle of an allocation. */
  ditorch_status (*memory_export)(int32_t device, const void* pointer,
                                  ditorch_memory_handle* handle);

  /* Where this process finds the allocation of another's handle; the offset is not looked at.
   * memory_copy of DITORCH_COPY_DEVICE_TO_DEVICE takes such pointers as its source. The other
   * process holds the memory until the copies are done. A handle that leads nowhere, its process
   * being dead, say, is DITORCH_INVALID. */
  ditorch_status (*memory_import)(int32_t device, const ditorch_memory_handle* handle,
                                  void** pointer);

  /* Lets go of what memory_import gave. Work submitted before may still use it, so the vendor waits
   * for that work if its driver does not. */
  ditorch_status (*memory_import_release)(int32_t device, void* pointer);
} ditorch_runtime;

/* The library's table, which lives as long as the process, or NULL if it does not speak
 * `abi_version`. */
const ditorch_runtime* ditorch_vendor_runtime(uint32_t abi_version);
typedef const ditorch_runtime* (*ditorch_vendor_runtime_fn)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
#endif
