// Waiting for a descriptor until a deadline, or until the one who waits is called off.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace dicomm {

struct Patience {
  std::chrono::steady_clock::time_point deadline;
  const std::atomic<bool>& called_off;

  // False: too late, or called off.
  bool wait(int fd, short events) const {
    while (!called_off) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) return false;
      pollfd waiting{fd, events, 0};
      constexpr std::int64_t turn_ms = 100;
      if (::poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left.count(), turn_ms))) > 0)
        return true;
    }
    return false;
  }
};

}  // namespace dicomm
