/* In place of the skeleton's memory.c, streams.c and events.c: a chip that does its work as late as
 * the ABI allows: when a stream or event is synchronized, or queried for the third time. Memory is
 * ordinary, and every copy but one from the host waits in its stream. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "chip.h"

#define QUERIES 3

typedef struct work {
  struct work* next;
  void* destination;
  const void* source;
  void* kept; /* what the host sent, which may be gone by now */
  size_t bytes;
} work;

struct ditorch_stream {
  struct ditorch_stream* next;
  work *first, **last;
  int queries;
};

struct ditorch_event {
  ditorch_stream* stream;
  int queries;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static ditorch_stream default_stream = {NULL, NULL, &default_stream.first, 0};
static ditorch_stream* streams = &default_stream;
static int32_t made, marked;

static ditorch_stream* of(ditorch_stream* stream) { return stream ? stream : &default_stream; }

static void finish(ditorch_stream* stream) {
  for (work* done = stream->first; done; done = stream->first) {
    memcpy(done->destination, done->source, done->bytes);
    stream->first = done->next;
    free(done->kept);
    free(done);
  }
  stream->last = &stream->first;
  stream->queries = 0;
}

static void finish_all(void) {
  for (ditorch_stream* stream = streams; stream; stream = stream->next) finish(stream);
}

static ditorch_status locked(int32_t device, void (*action)(ditorch_stream*),
                             ditorch_stream* stream) {
  pthread_mutex_lock(&mutex);
  action(stream);
  pthread_mutex_unlock(&mutex);
  return check_device(device);
}

static ditorch_status query(ditorch_stream* stream, int* queries) {
  ditorch_status status = DITORCH_OK;
  pthread_mutex_lock(&mutex);
  if (stream && stream->first) {
    if (++*queries < QUERIES)
      status = DITORCH_NOT_READY;
    else
      finish(stream);
  }
  pthread_mutex_unlock(&mutex);
  return status;
}

/* memory */

void* chip_bytes(const void* device_pointer) { return (void*)device_pointer; }

ditorch_status memory_allocate(int32_t device, size_t bytes, void** pointer) {
  *pointer = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
  return check_device(device);
}

ditorch_status memory_free(int32_t device, void* pointer) {
  pthread_mutex_lock(&mutex);
  finish_all();
  pthread_mutex_unlock(&mutex);
  free(pointer);
  return check_device(device);
}

ditorch_status memory_info(int32_t device, size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = CHIP_MEMORY_BYTES;
  return check_device(device);
}

ditorch_status memory_copy(int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, size_t bytes, ditorch_copy_kind kind) {
  work* later = malloc(sizeof *later);
  *later = (work){NULL, destination, source, NULL, bytes};
  if (kind == DITORCH_COPY_HOST_TO_DEVICE) {
    later->source = later->kept = malloc(bytes + 1);
    memcpy(later->kept, source, bytes);
  }
  pthread_mutex_lock(&mutex);
  *of(stream)->last = later;
  of(stream)->last = &later->next;
  pthread_mutex_unlock(&mutex);
  return check_device(device);
}

/* streams */

ditorch_status device_synchronize(int32_t device) {
  pthread_mutex_lock(&mutex);
  finish_all();
  pthread_mutex_unlock(&mutex);
  return check_device(device);
}

ditorch_status stream_create(int32_t device, int32_t priority, ditorch_stream** stream) {
  (void)priority;
  *stream = calloc(1, sizeof **stream);
  (*stream)->last = &(*stream)->first;
  pthread_mutex_lock(&mutex);
  (*stream)->next = streams;
  streams = *stream;
  made += 1;
  pthread_mutex_unlock(&mutex);
  return check_device(device);
}

/* How many streams ditorch has asked for. */
__attribute__((visibility("default"))) int32_t late_streams(void) { return made; }

ditorch_status stream_destroy(int32_t device, ditorch_stream* stream) {
  return locked(device, finish, of(stream));
}

ditorch_status stream_query(int32_t device, ditorch_stream* stream) {
  (void)device;
  return query(of(stream), &of(stream)->queries);
}

ditorch_status stream_synchronize(int32_t device, ditorch_stream* stream) {
  return locked(device, finish, of(stream));
}

/* events */

ditorch_status event_create(int32_t device, int32_t timed, ditorch_event** event) {
  (void)timed;
  *event = calloc(1, sizeof **event);
  return check_device(device);
}

ditorch_status event_destroy(int32_t device, ditorch_event* event) {
  free(event);
  return check_device(device);
}

/* How often ditorch has recorded an event. */
__attribute__((visibility("default"))) int32_t late_marks(void) { return marked; }

ditorch_status event_record(int32_t device, ditorch_event* event, ditorch_stream* stream) {
  marked += 1;
  *event = (ditorch_event){of(stream), 0};
  return check_device(device);
}

ditorch_status event_query(int32_t device, ditorch_event* event) {
  (void)device;
  return query(event->stream, &event->queries);
}

ditorch_status event_synchronize(int32_t device, ditorch_event* event) {
  return event->stream ? locked(device, finish, event->stream) : check_device(device);
}

ditorch_status stream_wait_event(int32_t device, ditorch_stream* stream, ditorch_event* event) {
  (void)stream;
  return event_synchronize(device, event);
}

ditorch_status event_elapsed_ns(int32_t device, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns) {
  (void)start;
  (void)end;
  *elapsed_ns = 0;
  return check_device(device);
}
