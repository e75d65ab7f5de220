#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace dicomm {

using Clock = std::chrono::steady_clock;

inline std::int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

// A timeout that nobody sees the end of; the clock can still express the moment.
constexpr std::chrono::hours kForEver{24 * 1000};

// However long the timeout, a moment that the clock can express.
inline Clock::time_point deadline_after(std::chrono::milliseconds timeout,
                                        Clock::time_point begun = Clock::now()) {
  return begun + std::min<std::chrono::milliseconds>(timeout, kForEver);
}

// Some milliseconds late, and several times cheaper.
inline std::int64_t rough_now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace dicomm
