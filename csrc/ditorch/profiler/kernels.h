// The chip's kernels for torch.profiler: what ran, on which stream, and when the chip did it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace ditorch {

struct Kernel {
  const char* name = nullptr;  // lives as long as the process
  bool on_host = false;        // the host computed it in the chip's stead
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  int64_t begin_ns = 0;  // CLOCK_MONOTONIC
  int64_t end_ns = 0;
  uint64_t correlation = 0;  // the operator of torch's that launched it
};

extern std::atomic<bool> profiler_listens;

// The operators that this thread is in, innermost last, as the profiler numbers them.
void enter_operator(uint64_t correlation);
void leave_operator();

// Notes the work that the calling thread has just ended; only while the profiler listens.
void record_kernel(c10::DeviceIndex device, const char* name, bool on_host);

// The kernels noted so far, which are forgotten.
std::vector<Kernel> take_kernels();

// Tells torch's profiler of the device.
void register_profiler();

}  // namespace ditorch
