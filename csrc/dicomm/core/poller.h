// What the thread that moves bytes sleeps on: every descriptor that may have something for it, and
// a way to wake it.
#pragma once

#include <sys/epoll.h>

#include <array>

#include "core/fd.h"
#include "core/guard.h"

namespace dicomm {

// Under the mutex, all of it.
class Poller {
 public:
  enum class Source { wakeup, lobby, peer };
  struct Event {
    Source source;
    int which;  // a peer's rank
  };

  Poller();  // throws Error

  void watch(int fd, Source source, int which = 0);
  // Whether it also matters that a peer's descriptor is writable.
  void watch_writable(int fd, int rank, bool writable);

  // Without the mutex, until something happens. Returns how many events there were.
  int sleep(Lock& lock, int timeout_ms);
  Event event(int i) const;

  bool sleeping() const { return sleeping_; }
  void wake() {
    if (sleeping_) write_wakeup();
  }
  void close() { epoll_ = Fd(); }

 private:
  void write_wakeup();
  void consume_wakeup();

  Fd epoll_;
  Fd wakeup_;
  bool sleeping_ = false;
  std::array<epoll_event, 32> events_{};  // of the last sleep
};

}  // namespace dicomm
