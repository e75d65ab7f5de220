// The runtime ABI's table: the device, its streams and events.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "chip.h"

struct ditorch_stream {
  async_chip::Queue queue;
};

struct ditorch_event {
  bool timed;
  std::shared_ptr<async_chip::Mark> mark;  // null: never recorded, which counts as done
};

namespace async_chip {

namespace {

thread_local std::string sentence;

struct Streams {
  std::mutex mutex;
  std::vector<Queue*> queues{new Queue(0)};  // the default stream's first
};

Streams& streams() {
  static auto* streams = new Streams();  // never destroyed: threads work to the end
  return *streams;
}

ditorch_status ready(bool is_ready) { return is_ready ? DITORCH_OK : DITORCH_NOT_READY; }

ditorch_status device_count(std::int32_t* count) {
  *count = 1;
  return DITORCH_OK;
}

ditorch_status device_properties(std::int32_t, ditorch_device_properties* properties) {
  for (auto* name : {&properties->vendor, &properties->chip_type, &properties->library})
    std::snprintf(*name, sizeof *name, "asyncchip");
  properties->memory_bytes = kMemoryBytes;
  return DITORCH_OK;  // neither the host nor a NIC reaches its memory
}

ditorch_status device_synchronize(std::int32_t) {
  synchronize_all();
  return DITORCH_OK;
}

ditorch_status stream_create(std::int32_t, std::int32_t, ditorch_stream** stream) {
  std::lock_guard lock(streams().mutex);
  *stream = new ditorch_stream{Queue(static_cast<unsigned>(streams().queues.size()))};
  streams().queues.push_back(&(*stream)->queue);
  return DITORCH_OK;
}

ditorch_status stream_destroy(std::int32_t, ditorch_stream* stream) {
  queue_of(stream).synchronize();  // its thread stays, as does the little that it holds
  return DITORCH_OK;
}

ditorch_status stream_query(std::int32_t, ditorch_stream* stream) {
  return ready(queue_of(stream).is_idle());
}

ditorch_status stream_synchronize(std::int32_t, ditorch_stream* stream) {
  queue_of(stream).synchronize();
  return DITORCH_OK;
}

ditorch_status event_create(std::int32_t, std::int32_t timed, ditorch_event** event) {
  *event = new ditorch_event{timed != 0, nullptr};
  return DITORCH_OK;
}

ditorch_status event_destroy(std::int32_t, ditorch_event* event) {
  delete event;
  return DITORCH_OK;
}

ditorch_status event_record(std::int32_t, ditorch_event* event, ditorch_stream* stream) {
  event->mark = queue_of(stream).mark();
  return DITORCH_OK;
}

ditorch_status event_query(std::int32_t, ditorch_event* event) {
  return ready(!event->mark || event->mark->has_happened());
}

ditorch_status event_synchronize(std::int32_t, ditorch_event* event) {
  if (const auto mark = event->mark) mark->wait();
  return DITORCH_OK;
}

ditorch_status stream_wait_event(std::int32_t, ditorch_stream* stream, ditorch_event* event) {
  if (const auto mark = event->mark) queue_of(stream).submit([mark] { mark->wait(); });
  return DITORCH_OK;
}

ditorch_status event_elapsed_ns(std::int32_t, ditorch_event* start, ditorch_event* end,
                                std::int64_t* elapsed_ns) {
  if (!start->timed || !end->timed || !start->mark || !end->mark)
    return fail(DITORCH_INVALID, "both events must be timed and recorded");
  if (!start->mark->has_happened() || !end->mark->has_happened()) return DITORCH_NOT_READY;
  *elapsed_ns = end->mark->happened_at_ns() - start->mark->happened_at_ns();
  return DITORCH_OK;
}

ditorch_runtime table() {
  ditorch_runtime runtime{};
  runtime.abi_version = DITORCH_RUNTIME_ABI_VERSION;
  runtime.struct_size = sizeof runtime;
  runtime.last_error = last_error;
  runtime.device_count = device_count;
  runtime.device_properties = device_properties;
  runtime.device_synchronize = device_synchronize;
  runtime.memory_allocate = memory_allocate;
  runtime.memory_free = memory_free;
  runtime.memory_info = memory_info;
  runtime.memory_copy = memory_copy;
  runtime.stream_create = stream_create;
  runtime.stream_destroy = stream_destroy;
  runtime.stream_query = stream_query;
  runtime.stream_synchronize = stream_synchronize;
  runtime.event_create = event_create;
  runtime.event_destroy = event_destroy;
  runtime.event_record = event_record;
  runtime.event_query = event_query;
  runtime.event_synchronize = event_synchronize;
  runtime.stream_wait_event = stream_wait_event;
  runtime.event_elapsed_ns = event_elapsed_ns;
  runtime.memory_peer_handle = memory_peer_handle;
  runtime.memory_export = memory_export;
  runtime.memory_import = memory_import;
  runtime.memory_import_release = memory_import_release;
  return runtime;
}

}  // namespace

unsigned setting(const char* name, unsigned otherwise) {
  const char* text = std::getenv(name);
  return text ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : otherwise;
}

ditorch_status fail(ditorch_status status, const std::string& text) {
  sentence = text;
  return status;
}

const char* last_error() { return sentence.c_str(); }

Queue& queue_of(ditorch_stream* stream) {
  return stream ? stream->queue : *streams().queues.front();
}

void synchronize_all() {
  std::vector<std::shared_ptr<Mark>> marks;
  {
    std::lock_guard lock(streams().mutex);
    for (Queue* queue : streams().queues)
      if (!queue->is_idle()) marks.push_back(queue->mark());
  }
  for (const auto& mark : marks) mark->wait();
}

}  // namespace async_chip

const ditorch_runtime* ditorch_vendor_runtime(std::uint32_t abi_version) {
  static const ditorch_runtime runtime = async_chip::table();
  return abi_version == DITORCH_RUNTIME_ABI_VERSION ? &runtime : nullptr;
}

// For tests: what is submitted to the default stream from now on, or to all others that there are,
// waits until it is released, or for so many milliseconds.
static async_chip::Mark* released = nullptr;

static void hold(async_chip::Queue& queue, std::int32_t milliseconds) {
  queue.submit([=, until = released] { until->wait_for(std::chrono::milliseconds(milliseconds)); });
}

extern "C" void async_chip_hold(std::int32_t milliseconds) {
  released = new async_chip::Mark();
  hold(async_chip::queue_of(nullptr), milliseconds);
}

extern "C" void async_chip_hold_others(std::int32_t milliseconds) {
  released = new async_chip::Mark();
  std::lock_guard lock(async_chip::streams().mutex);
  for (async_chip::Queue* queue : async_chip::streams().queues)
    if (queue != async_chip::streams().queues.front()) hold(*queue, milliseconds);
}

extern "C" void async_chip_release() { released->happen(); }
