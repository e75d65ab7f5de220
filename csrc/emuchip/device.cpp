#include "device.h"

#include <algorithm>
#include <cmath>

#include "clock.h"

namespace emuchip {

Device::Device(int32_t index, const ChipFile& chip)
    : index(index), chip(chip), release_ns(now_ns()), reset_at_ns(release_ns) {}

int64_t Device::submit(ditorch_stream& stream, int64_t begin_ns, double duration_s) {
  const int64_t duration_ns = std::llround(duration_s * 1e9);
  const int64_t start_ns = std::max(stream.ready_at_ns, begin_ns);
  const int64_t end_ns = std::max(start_ns + duration_ns, now_ns());
  // A host that is fast enough has the work submitted before the stream runs dry.
  const int64_t unhindered_end_ns = std::max(stream.ready_at_ns, release_ns) + duration_ns;
  busy_ns += duration_ns;
  lost_ns += std::max<int64_t>(0, end_ns - unhindered_end_ns);
  wait_until(stream, end_ns);
  return end_ns;
}

void Device::wait_until(ditorch_stream& stream, int64_t until_ns) {
  stream.ready_at_ns = std::max(stream.ready_at_ns, until_ns);
  latest_ready_at_ns = std::max(latest_ready_at_ns, stream.ready_at_ns);
}

void Device::release_host(int64_t now_ns) { release_ns = std::max(release_ns, now_ns); }

void hold_host_until(Device& device, int64_t moment_ns) {
  sleep_until_ns(moment_ns);
  const std::lock_guard lock(device.mutex);
  device.release_host(now_ns());
}

}  // namespace emuchip
