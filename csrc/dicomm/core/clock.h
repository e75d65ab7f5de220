#pragma once

#include <chrono>
#include <cstdint>

namespace dicomm {

using Clock = std::chrono::steady_clock;

inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

}  // namespace dicomm
