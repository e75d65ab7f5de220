#include "clock.h"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

namespace emuchip {
namespace {

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr int64_t kWakeUp_ns = 10'000;  // what it takes to fall asleep and to wake up again

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNanosecondsPerSecond + now.tv_nsec;
}

void sleep_until_ns(int64_t moment_ns) {
  if (moment_ns - now_ns() > kWakeUp_ns) {
    // By default the kernel wakes a thread up to 50 us late, which is longer than a small chip's
    // whole step of work. The program's own sleeps keep their slack.
    const int slack_ns = ::prctl(PR_GET_TIMERSLACK);
    ::prctl(PR_SET_TIMERSLACK, 1);
    // An absolute deadline: a signal that interrupts the sleep does not lengthen it.
    const int64_t wake_ns = moment_ns - kWakeUp_ns;
    const timespec moment = {static_cast<time_t>(wake_ns / kNanosecondsPerSecond),
                             static_cast<long>(wake_ns % kNanosecondsPerSecond)};
    while (now_ns() < wake_ns) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr);
    ::prctl(PR_SET_TIMERSLACK, slack_ns);
  }
  while (now_ns() < moment_ns) ::sched_yield();  // chips share cores with each other
}

}  // namespace emuchip
