#include "clock.h"

#include <time.h>

namespace emuchip {
namespace {

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNanosecondsPerSecond + now.tv_nsec;
}

void sleep_until_ns(int64_t moment_ns) {
  // An absolute deadline: a signal that interrupts the sleep does not lengthen it.
  const timespec moment = {static_cast<time_t>(moment_ns / kNanosecondsPerSecond),
                           static_cast<long>(moment_ns % kNanosecondsPerSecond)};
  while (now_ns() < moment_ns) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr);
}

}  // namespace emuchip
