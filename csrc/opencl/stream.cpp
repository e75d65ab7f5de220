#include "stream.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

struct ditorch_stream {
  std::shared_ptr<opencl::Stream> stream;
};

namespace opencl {
namespace {

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

struct Span {
  int64_t begin_ns = 0;  // of the host, for an operator that submits nothing
  Mark first, last;
};

// Never destroyed: a thread may end after the driver.
Span& span() {
  thread_local auto* own = new Span();
  return *own;
}

// What turns the device's clock into the host's CLOCK_MONOTONIC, found by a mark that the host
// waits for.
int64_t clock_offset_ns(Device& device) {
  static std::mutex mutex;
  static std::vector<std::pair<const Device*, int64_t>> known;
  std::lock_guard lock(mutex);
  for (const auto& [of, offset_ns] : known) {
    if (of == &device) return offset_ns;
  }
  Stream& stream = device.streams->of(nullptr);
  stream.synchronize();
  const Mark mark = Submission(stream).mark();
  mark.wait(device);
  const int64_t offset_ns = now_ns() - mark.time_ns(device, CL_PROFILING_COMMAND_END);
  known.emplace_back(&device, offset_ns);
  return offset_ns;
}

}  // namespace

bool Mark::has_happened(const Device& device) const {
  cl_int status = CL_QUEUED;
  device.check(
      clGetEventInfo(get(), CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, nullptr),
      "tell of its work");
  if (status < 0) device.check(status, "do its work");
  return status == CL_COMPLETE;
}

void Mark::wait(const Device& device) const {
  const cl_event event = get();
  const cl_int code = clWaitForEvents(1, &event);
  if (code == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST) has_happened(device);
  device.check(code, "wait for its work");
}

int64_t Mark::time_ns(const Device& device, cl_profiling_info what) const {
  cl_ulong time = 0;
  device.check(clGetEventProfilingInfo(get(), what, sizeof time, &time, nullptr),
               "tell when it did its work");
  return static_cast<int64_t>(time);
}

Stream::Stream(Device& device) : device(device) {
  const cl_queue_properties properties[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_PROFILING_ENABLE, 0};
  cl_int code;
  queue = clCreateCommandQueueWithProperties(device.context, device.id, properties, &code);
  device.check(code, "create a command queue");
}

Stream::~Stream() {
  if (scratch_) clSVMFree(device.context, scratch_);
  clReleaseCommandQueue(queue);
}

Mark Stream::last() {
  std::lock_guard lock(mutex_);
  return last_;
}

bool Stream::is_idle() {
  const Mark mark = last();
  if (!mark) return true;
  device.check(clFlush(queue), "start its work");
  return mark.has_happened(device);
}

void Stream::synchronize() {
  if (const Mark mark = last()) mark.wait(device);
}

Streams::Streams(Device& device)
    : device_(device), default_(std::make_shared<Stream>(device)), all_{default_} {}

Stream& Streams::of(ditorch_stream* handle) { return handle ? *handle->stream : *default_; }

ditorch_stream* Streams::create() {
  auto stream = std::make_shared<Stream>(device_);
  std::lock_guard lock(mutex_);
  all_.push_back(stream);
  return new ditorch_stream{stream};
}

void Streams::destroy(ditorch_stream* handle) {
  if (!handle) return;
  handle->stream->synchronize();
  std::lock_guard lock(mutex_);
  std::erase(all_, handle->stream);
  delete handle;
}

void Streams::synchronize_all() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard lock(mutex_);
    all = all_;
  }
  for (const auto& stream : all) stream->synchronize();
}

void Submission::note(cl_event event) {
  Mark mark(event);
  Span& own = span();
  if (!own.first) own.first = mark;
  own.last = mark;
  std::lock_guard lock(stream_.mutex_);
  stream_.last_ = std::move(mark);
}

void Submission::enqueue(cl_kernel kernel, Sizes groups, size_t items_of_group) {
  const Sizes global = {groups[0] * items_of_group, groups[1], groups[2]};
  const Sizes local = {items_of_group, 1, 1};
  cl_event event;
  device().check(clEnqueueNDRangeKernel(stream_.queue, kernel, 3, nullptr, global.data(),
                                        local.data(), 0, nullptr, &event),
                 "launch a kernel");
  note(event);
}

void Submission::copy(void* destination, const void* source, size_t bytes, bool blocking) {
  cl_event event;
  device().check(
      clEnqueueSVMMemcpy(stream_.queue, blocking, destination, source, bytes, 0, nullptr, &event),
      "copy");
  note(event);
}

void Submission::copy_from_host(void* destination, const void* source, size_t bytes) {
  // Where nothing has to be waited for, the copy itself is as fast as keeping the source.
  if (stream_.is_idle()) return copy(destination, source, bytes, true);
  void* kept = std::malloc(bytes);
  if (!kept) return copy(destination, source, bytes, true);
  std::memcpy(kept, source, bytes);
  copy(destination, kept, bytes, false);
  const auto release = [](cl_event, cl_int, void* memory) { std::free(memory); };
  device().check(clSetEventCallback(stream_.last().get(), CL_COMPLETE, release, kept),
                 "take a callback");
}

Mark Submission::mark() {
  cl_event event;
  device().check(clEnqueueMarkerWithWaitList(stream_.queue, 0, nullptr, &event), "mark a stream");
  const Mark mark(event);
  {
    std::lock_guard lock(stream_.mutex_);
    stream_.last_ = mark;
  }
  device().check(clFlush(stream_.queue), "start its work");
  return mark;
}

void Submission::wait_for(const Mark& mark) {
  const cl_event awaited = mark.get();
  cl_event event;
  device().check(clEnqueueBarrierWithWaitList(stream_.queue, 1, &awaited, &event),
                 "wait for an event");
  std::lock_guard lock(stream_.mutex_);
  stream_.last_ = Mark(event);
}

void* Submission::scratch(size_t bytes) {
  if (bytes <= stream_.scratch_bytes_) return stream_.scratch_;
  stream_.synchronize();
  if (stream_.scratch_) clSVMFree(device().context, stream_.scratch_);
  stream_.scratch_bytes_ = 0;
  stream_.scratch_ = clSVMAlloc(device().context, CL_MEM_READ_WRITE, bytes, 0);
  if (!stream_.scratch_) {
    fail(DITORCH_OUT_OF_MEMORY, "the OpenCL device " + device().described() + " has no " +
                                    std::to_string(bytes) + " bytes for a kernel to work in");
  }
  stream_.scratch_bytes_ = bytes;
  return stream_.scratch_;
}

void begin_span() {
  Span& own = span();
  own.begin_ns = now_ns();
  own.first = own.last = Mark();
}

std::pair<int64_t, int64_t> span_ns(Device& device) {
  const Span own = span();
  if (!own.first) return {own.begin_ns, now_ns()};
  own.last.wait(device);
  const int64_t offset_ns = clock_offset_ns(device);
  return {own.first.time_ns(device, CL_PROFILING_COMMAND_START) + offset_ns,
          own.last.time_ns(device, CL_PROFILING_COMMAND_END) + offset_ns};
}

}  // namespace opencl
