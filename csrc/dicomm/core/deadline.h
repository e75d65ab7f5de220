// Waiting for a descriptor until a deadline, or until the one who waits is called off; and what may
// succeed when it is tried again until then.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "core/communicator.h"
#include "core/text.h"

namespace dicomm {

// Not this time: there may be too many callers, or a side lacks descriptors just now.
class TurnedAway : public Error {
 public:
  using Error::Error;
};

// What listens there is not on this host, whatever its host id says: clones of a virtual machine
// have the same one.
class NotThisHost : public Error {
 public:
  using Error::Error;
};

constexpr const char* kNoDescriptors = "this rank has no file descriptors left (ulimit -n)";

[[noreturn]] inline void throw_no_socket(int error) {
  if (error == EMFILE || error == ENFILE) throw TurnedAway(kNoDescriptors);
  throw Error(text("cannot make a socket: ", system_error(error)));
}

struct Deadline {
  std::chrono::steady_clock::time_point at;
  const std::atomic<bool>& called_off;

  // False: too late, or called off.
  bool wait(int fd, short events) const {
    while (!called_off) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(at - std::chrono::steady_clock::now());
      if (left.count() <= 0) return false;
      pollfd waiting{fd, events, 0};
      constexpr std::int64_t turn_ms = 100;
      if (::poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left.count(), turn_ms))) > 0)
        return true;
    }
    return false;
  }

  // False: it ends before the pause does, or is called off.
  bool rest(std::chrono::milliseconds pause) const {
    if (std::chrono::steady_clock::now() + pause >= at) return false;
    std::this_thread::sleep_for(pause);
    return !called_off;
  }
};

}  // namespace dicomm
