// Streams are in-order command queues; what an operator submits to one is a Submission.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device.h"

namespace opencl {

// A cl_event that is released with its last owner.
class Mark {
 public:
  Mark() = default;
  explicit Mark(cl_event event) : event_(event, clReleaseEvent) {}

  explicit operator bool() const { return event_ != nullptr; }
  cl_event get() const { return event_.get(); }
  // Throws if the command failed.
  bool has_happened(const Device& device) const;
  void wait(const Device& device) const;
  int64_t time_ns(const Device& device, cl_profiling_info what) const;

 private:
  std::shared_ptr<std::remove_pointer_t<cl_event>> event_;
};

class Stream {
 public:
  explicit Stream(Device& device);
  ~Stream();

  bool is_idle();
  void synchronize();

  Device& device;
  cl_command_queue queue = nullptr;

 private:
  friend class Submission;
  Mark last();

  std::mutex mutex_;
  Mark last_;  // the latest command: the queue is done when it is
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

class Streams {
 public:
  explicit Streams(Device& device);

  Stream& of(ditorch_stream* handle);  // NULL is the default stream
  ditorch_stream* create();
  void destroy(ditorch_stream* handle);
  void synchronize_all();

 private:
  Device& device_;
  const std::shared_ptr<Stream> default_;
  std::mutex mutex_;  // guards all_
  std::vector<std::shared_ptr<Stream>> all_;
};

// One operator's commands. While it lives, no other thread submits anything to the device.
class Submission {
 public:
  explicit Submission(Stream& stream) : stream_(stream), lock_(stream.device.submitting) {}

  using Sizes = std::array<size_t, 3>;

  // Launches a kernel: arguments that are pointers point into the device's memory, the rest is
  // passed by value.
  template <class... Arguments>
  void launch(cl_kernel kernel, Sizes groups, size_t items_of_group, Arguments... arguments) {
    cl_uint index = 0;
    (set(kernel, index++, arguments), ...);
    enqueue(kernel, groups, items_of_group);
  }

  // Launches a kernel whose items are independent of each other: at least so many of them.
  template <class... Arguments>
  void launch_items(cl_kernel kernel, Sizes items, Arguments... arguments) {
    launch_items_over(kernel, items, {}, arguments...);
  }

  // The same where the first arguments are so many pointers as only a call tells.
  template <class... Arguments>
  void launch_items_over(cl_kernel kernel, Sizes items, const std::vector<void*>& pointers,
                         Arguments... arguments) {
    const size_t together = device().is_cpu ? 1 : 64;
    cl_uint index = 0;
    for (void* pointer : pointers) set(kernel, index++, pointer);
    (set(kernel, index++, arguments), ...);
    enqueue(kernel, {(items[0] + together - 1) / together, items[1], items[2]}, together);
  }

  void copy(void* destination, const void* source, size_t bytes, bool blocking);
  // Lets the host change `source` at once.
  void copy_from_host(void* destination, const void* source, size_t bytes);
  Mark mark();
  void wait_for(const Mark& mark);
  // Notes a command that somebody else enqueued.
  void note(cl_event event);

  // Memory for the kernels of this submission, the same for all calls; valid while it lives.
  void* scratch(size_t bytes);

  Stream& stream() { return stream_; }
  Device& device() { return stream_.device; }

 private:
  template <class T>
  void set(cl_kernel kernel, cl_uint index, T value) {
    if constexpr (std::is_pointer_v<T>) {
      device().check(clSetKernelArgSVMPointer(kernel, index, value), "set a kernel's pointer");
    } else {
      device().check(clSetKernelArg(kernel, index, sizeof value, &value),
                     "set a kernel's argument");
    }
  }
  void enqueue(cl_kernel kernel, Sizes groups, size_t items_of_group);

  Stream& stream_;
  std::lock_guard<std::mutex> lock_;
};

// The commands that the calling thread submitted since begin_span, for torch's profiler.
void begin_span();
std::pair<int64_t, int64_t> span_ns(Device& device);

}  // namespace opencl
