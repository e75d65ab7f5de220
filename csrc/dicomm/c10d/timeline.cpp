#include "timeline.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <thread>

namespace dicomm {

namespace {

using SteadyClock = std::chrono::steady_clock;  // CLOCK_MONOTONIC

std::mutex clocks_mutex;
std::array<DeviceClock, c10::COMPILE_TIME_MAX_DEVICE_TYPES> clocks;

DeviceClock clock_of(c10::Device device) {
  if (device.is_cpu()) return {};
  std::lock_guard lock(clocks_mutex);
  return clocks[static_cast<std::size_t>(device.type())];
}

SteadyClock::time_point moment(std::int64_t t) {
  return SteadyClock::time_point(std::chrono::nanoseconds(t));
}

}  // namespace

void set_device_clock(c10::DeviceType type, DeviceClock clock) {
  std::lock_guard lock(clocks_mutex);
  clocks[static_cast<std::size_t>(type)] = clock;
}

bool works_behind_the_host(c10::Device device) {
  return !device.is_cpu() && !Timeline(device).is_emulated();
}

Timeline::Timeline(c10::Device device) : device_(device), clock_(clock_of(device)) {}

std::int64_t Timeline::ready_at_ns() const {
  if (is_emulated()) {
    // An idle chip's clock lies in the past; nothing submitted now starts before now.
    const std::int64_t now = SteadyClock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    return std::max(clock_.ready_at_ns(device_.index()), now);
  }
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    guard.synchronizeStream(guard.getStream(device_));
  }
  return 0;
}

void Timeline::wait_until_ns(std::int64_t t) const {
  if (t == 0) return;
  if (is_emulated())
    clock_.wait_until_ns(device_.index(), t);
  else
    std::this_thread::sleep_until(moment(t));
}

bool Timeline::has_come(std::int64_t t) { return SteadyClock::now() >= moment(t); }

}  // namespace dicomm
