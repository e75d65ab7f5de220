/* In place of the skeleton's memory.c: a chip whose memory the host cannot touch, as on a real
 * accelerator. Its pointers have a bit set that no address of a process has, so that a host that
 * follows one ends in a segmentation fault. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "chip.h"

#define HIDDEN ((uintptr_t)1 << 52)

typedef struct allocation {
  struct allocation* next;
  void* memory;
  size_t bytes;
} allocation;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static allocation* allocations;
static size_t used_bytes;

void* chip_bytes(const void* device_pointer) {
  return (void*)((uintptr_t)device_pointer & ~HIDDEN);
}

ditorch_status memory_allocate(int32_t device, size_t bytes, void** pointer) {
  *pointer = NULL;
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK || bytes == 0) return status;
  pthread_mutex_lock(&mutex);
  const size_t free_bytes = CHIP_MEMORY_BYTES - used_bytes;
  if (bytes <= free_bytes) {
    allocation* made = malloc(sizeof *made);
    *made = (allocation){allocations, aligned_alloc(64, (bytes + 63) / 64 * 64), bytes};
    memset(made->memory, 0xA5, bytes); /* what is never written is no zero by luck */
    allocations = made;
    used_bytes += bytes;
    *pointer = (void*)((uintptr_t)made->memory | HIDDEN);
  }
  pthread_mutex_unlock(&mutex);
  if (*pointer) return DITORCH_OK;
  return fail(DITORCH_OUT_OF_MEMORY, "%zu bytes are free, and %zu were asked for", free_bytes,
              bytes);
}

ditorch_status memory_free(int32_t device, void* pointer) {
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK || !pointer) return status;
  pthread_mutex_lock(&mutex);
  allocation** link = &allocations;
  while (*link && (*link)->memory != chip_bytes(pointer)) link = &(*link)->next;
  allocation* found = *link;
  if (found) {
    *link = found->next;
    used_bytes -= found->bytes;
    free(found->memory);
    free(found);
  }
  pthread_mutex_unlock(&mutex);
  return found ? DITORCH_OK : fail(DITORCH_INVALID, "%p was not allocated", pointer);
}

ditorch_status memory_info(int32_t device, size_t* free_bytes, size_t* total_bytes) {
  pthread_mutex_lock(&mutex);
  *free_bytes = CHIP_MEMORY_BYTES - used_bytes;
  pthread_mutex_unlock(&mutex);
  *total_bytes = CHIP_MEMORY_BYTES;
  return check_device(device);
}

/* A device pointer without the bit is the host's: a mix-up of the two. */
static int is_hidden(const void* pointer) { return ((uintptr_t)pointer & HIDDEN) != 0; }

ditorch_status memory_copy(int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind) {
  (void)stream;
  ditorch_status status = check_device(device);
  if (status != DITORCH_OK || bytes == 0) return status;
  if (is_hidden(destination) != (kind != DITORCH_COPY_DEVICE_TO_HOST) ||
      is_hidden(source) != (kind != DITORCH_COPY_HOST_TO_DEVICE)) {
    return fail(DITORCH_INVALID, "copy kind %d from %p to %p", kind, source, destination);
  }
  char* to = chip_bytes(destination);
  const char* from = chip_bytes(source);
  if (to < from + bytes && from < to + bytes) {
    return fail(DITORCH_INVALID, "a copy of %zu bytes from %p to %p overlaps itself", bytes, source,
                destination);
  }
  memcpy(to, from, bytes);
  return DITORCH_OK;
}
