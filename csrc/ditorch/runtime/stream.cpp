#include "runtime/stream.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <shared_mutex>
#include <vector>

namespace ditorch {
namespace {

constexpr int kMaxDevices = 64;
constexpr size_t kStreamsOfAPool = 32;  // as many as torch keeps on CUDA
constexpr int kPriorities = 4;          // 0, and -1 to -3, which go first

// Stream 0 is the default one; stream n is entry n - 1. Streams live as long as the process,
// because torch copies their ids freely.
std::shared_mutex streams_mutex;
std::vector<ditorch_stream*>& streams() {
  static auto* all = new std::vector<ditorch_stream*>();
  return *all;
}

// Streams of one device and priority. They are handed out in turn, and after the last one the first
// again: a program that asks for a stream in every step does not fill the chip with them.
struct Pool {
  std::array<c10::StreamId, kStreamsOfAPool> ids{};  // 0: not made yet
  size_t asked = 0;
};

Pool& pool_of(c10::DeviceIndex device, int priority) {
  static auto* pools = new std::array<std::array<Pool, kPriorities>, kMaxDevices>();
  return pools->at(device).at(static_cast<size_t>(-priority));
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> this_stream{};

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, chip_device(device), id);
}

void check_index(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < vendor().devices.size(), "device index ",
              static_cast<int>(device), " is out of range: this process drives ",
              vendor().devices.size(), " chip(s)");
}

}  // namespace

c10::DeviceIndex current_device() noexcept { return this_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check_index(device);
  return std::exchange(this_device, device);
}

c10::Stream default_stream(c10::DeviceIndex device) { return make_stream(device, 0); }

c10::Stream pool_stream(c10::DeviceIndex device, int priority) {
  check_index(device);
  priority = std::clamp(priority, 1 - kPriorities, 0);
  std::unique_lock lock(streams_mutex);
  auto& pool = pool_of(device, priority);
  auto& id = pool.ids[pool.asked % kStreamsOfAPool];
  if (id == 0) {
    ditorch_stream* created = nullptr;
    check(vendor().runtime->stream_create(device, priority, &created), "create a stream");
    streams().push_back(created);
    id = static_cast<c10::StreamId>(streams().size());
  }
  pool.asked += 1;
  return make_stream(device, id);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return make_stream(device, this_stream.at(device));
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto device = stream.device_index();
  check_index(device);
  return make_stream(device, std::exchange(this_stream.at(device), stream.id()));
}

ditorch_stream* handle_of(c10::Stream stream) {
  if (stream.id() == 0) return nullptr;
  std::shared_lock lock(streams_mutex);
  return streams().at(stream.id() - 1);
}

}  // namespace ditorch
