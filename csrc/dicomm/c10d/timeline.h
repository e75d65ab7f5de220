// Whose clock orders an operation's data: the host's, a device's, or an emulated chip's.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace dicomm {

// The two functions by which an emulated chip shares the clock of its current stream.
struct DeviceClock {
  std::int64_t (*ready_at_ns)(std::int32_t device_index) = nullptr;
  void (*wait_until_ns)(std::int32_t device_index, std::int64_t t) = nullptr;
};

void set_device_clock(c10::DeviceType type, DeviceClock clock);

// Whether a device's streams, and not the host, say what its memory holds: a chip's, unless it is
// emulated, whose memory has at once what only its clock has later.
bool works_behind_the_host(c10::Device device);

class Timeline {
 public:
  explicit Timeline(c10::Device device);

  bool is_emulated() const { return clock_.ready_at_ns != nullptr; }
  // When the current stream's work so far is done, on an emulated chip's clock. Elsewhere: waits
  // for it, and returns 0 (now).
  std::int64_t ready_at_ns() const;
  // Nothing that follows may happen before t: an emulated chip's current stream waits; elsewhere
  // the host does.
  void wait_until_ns(std::int64_t t) const;
  // Whether that moment has come.
  static bool has_come(std::int64_t t);

 private:
  c10::Device device_;
  DeviceClock clock_;
};

}  // namespace dicomm
