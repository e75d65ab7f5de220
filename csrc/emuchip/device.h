// One emulated device: its streams' clocks, its memory and its account of time.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "chip_file.h"
#include "runtime.h"

struct ditorch_stream {
  int64_t ready_at_ns = 0;  // when the chip will have finished what was submitted so far
};

struct ditorch_event {
  bool timed = false;
  bool recorded = false;
  int64_t ready_at_ns = 0;    // the stream's clock when recorded: what a waiter waits for
  int64_t stamped_at_ns = 0;  // when the chip comes to the event: never before it was recorded
};

namespace emuchip {

struct Device {
  Device(int32_t index, const ChipFile& chip);

  ditorch_stream& stream(ditorch_stream* stream) { return stream ? *stream : default_stream; }

  // The rest expects `mutex` to be held.

  // Work of `duration_s` that the host computed from `begin_ns` to now. Returns when it ends.
  int64_t submit(ditorch_stream& stream, int64_t begin_ns, double duration_s);

  void wait_until(ditorch_stream& stream, int64_t until_ns);

  // The host came back from a wait the program asked for: it is not late before this moment.
  void release_host(int64_t now_ns);

  const int32_t index;
  const ChipFile& chip;
  std::mutex mutex;  // guards everything below, and the streams and events of the device

  ditorch_stream default_stream;
  int64_t latest_ready_at_ns = 0;  // over all streams, destroyed ones included

  std::unordered_map<void*, int64_t> allocated_bytes;
  int64_t used_bytes = 0;

  int64_t release_ns;
  int64_t reset_at_ns;
  int64_t busy_ns = 0;
  int64_t lost_ns = 0;
};

// The device, or NULL with last_error set when there is no chip file or no such device.
Device* find_device(int32_t index);

// Devices of this process, or -1 with last_error set.
int32_t count_devices();

// Sleeps until the moment, then releases the host. Called without the mutex.
void hold_host_until(Device& device, int64_t moment_ns);

}  // namespace emuchip
