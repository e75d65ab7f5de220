/* The chip's memory. Here it is the host's, counted; every function is to be REPLACED. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "chip.h"

#define ALIGNMENT_BYTES ((size_t)64)

typedef struct allocation {
  struct allocation* next;
  void* pointer;
  size_t bytes;
} allocation;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the two below */
static allocation* allocations[CHIP_DEVICES];
static size_t used_bytes[CHIP_DEVICES];

/* REPLACE by your driver's allocation, for example driverMalloc(&pointer, bytes). */
ditorch_status memory_allocate(int32_t device, size_t bytes, void** pointer) {
  *pointer = NULL;
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK || bytes == 0) return status;
  pthread_mutex_lock(&mutex);
  const size_t free_bytes = CHIP_MEMORY_BYTES - used_bytes[device];
  allocation* made = NULL;
  if (bytes <= free_bytes) {
    const size_t padded = (bytes + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    made = malloc(sizeof *made);
    void* memory = aligned_alloc(ALIGNMENT_BYTES, padded);
    if (made && memory) {
      *made = (allocation){allocations[device], memory, bytes};
      allocations[device] = made;
      used_bytes[device] += bytes;
      *pointer = memory;
    } else {
      free(made);
      free(memory);
    }
  }
  pthread_mutex_unlock(&mutex);
  if (*pointer) return DITORCH_OK;
  return fail(DITORCH_OUT_OF_MEMORY, "device %d has %zu bytes free, and %zu were asked for", device,
              free_bytes, bytes);
}

/* REPLACE by your driver's release; it must not pull memory from under work submitted before. */
ditorch_status memory_free(int32_t device, void* pointer) {
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK || !pointer) return status;
  pthread_mutex_lock(&mutex);
  allocation** link = &allocations[device];
  while (*link && (*link)->pointer != pointer) link = &(*link)->next;
  allocation* found = *link;
  if (found) {
    *link = found->next;
    used_bytes[device] -= found->bytes;
  }
  pthread_mutex_unlock(&mutex);
  if (!found) return fail(DITORCH_INVALID, "%p was not allocated on device %d", pointer, device);
  free(found->pointer);
  free(found);
  return DITORCH_OK;
}

/* REPLACE by your driver's account. */
ditorch_status memory_info(int32_t device, size_t* free_bytes, size_t* total_bytes) {
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK) return status;
  pthread_mutex_lock(&mutex);
  *free_bytes = CHIP_MEMORY_BYTES - used_bytes[device];
  pthread_mutex_unlock(&mutex);
  *total_bytes = CHIP_MEMORY_BYTES;
  return DITORCH_OK;
}

/* REPLACE by your driver's asynchronous copy, for example
 * driverMemcpyAsync(destination, source, bytes, kind, stream); from the host it must have read the
 * source when it returns, so wait there if the driver has not. */
ditorch_status memory_copy(int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind) {
  (void)stream; /* the work is done at once, so every stream is up to date */
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK || bytes == 0) return status;
  if (!destination || !source) {
    return fail(DITORCH_INVALID, "a copy of %zu bytes from %p to %p", bytes, source, destination);
  }
  if (kind != DITORCH_COPY_DEVICE_TO_HOST) destination = chip_bytes(destination);
  if (kind != DITORCH_COPY_HOST_TO_DEVICE) source = chip_bytes(source);
  memcpy(destination, source, bytes);
  return DITORCH_OK;
}

void* chip_bytes(const void* device_pointer) { return (void*)device_pointer; }
