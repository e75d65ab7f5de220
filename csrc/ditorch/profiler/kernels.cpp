#include "profiler/kernels.h"

#include <mutex>
#include <utility>

#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

std::mutex mutex;
std::vector<Kernel>& noted_kernels() {
  static auto* all = new std::vector<Kernel>();  // autograd's threads may outlive statics
  return *all;
}

thread_local std::vector<uint64_t> operators;

}  // namespace

std::atomic<bool> profiler_listens{false};

void enter_operator(uint64_t correlation) { operators.push_back(correlation); }

void leave_operator() {
  if (!operators.empty()) operators.pop_back();
}

void record_kernel(c10::DeviceIndex device, const char* name, bool on_host) {
  const auto& runtime = *vendor().runtime;
  Kernel kernel{.name = name,
                .on_host = on_host,
                .device = device,
                .stream = current_stream(device).id(),
                .correlation = operators.empty() ? 0 : operators.back()};
  if (!runtime.work_span_ns ||
      runtime.work_span_ns(device, &kernel.begin_ns, &kernel.end_ns) != DITORCH_OK) {
    return;
  }
  std::lock_guard lock(mutex);
  noted_kernels().push_back(kernel);
}

std::vector<Kernel> take_kernels() {
  std::lock_guard lock(mutex);
  return std::exchange(noted_kernels(), {});
}

}  // namespace ditorch
