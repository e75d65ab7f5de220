// The callers who wait until they have proven that they are ranks of this job.
//
// There are only so many places. While all are taken nobody is accepted, and callers wait in the
// kernel's queue, which is in order. Callers who have said nothing make room after a moment,
// greeted ones after a second: strangers who keep the places delay a rank by a few seconds, however
// many they are. A rank that was too slow and had to go calls again.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/fd.h"
#include "core/handshake.h"

namespace dicomm {

class Lobby {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Called with each caller that has proven to know the secret.
  using Admit = std::function<void(PendingConnection&)>;

  Lobby(const Identity& me, Admit admit);

  // Accepts callers there from now on, and tells by the number which door they came to; the
  // listener stays the caller's.
  void open(int listener, std::size_t door);
  void close();

  // serve() has something to do when fd() is readable, and at wake_at().
  int fd() const { return epoll_.get(); }
  Time wake_at() const;
  // Accepts, listens to and dismisses callers, without blocking.
  void serve();

  std::string last_refusal;  // why the last caller who was no rank had to go

 private:
  struct Door {
    int listener;
    std::size_t number;
  };

  void watch(int fd);
  void accept_from(const Door& door);
  bool accept_failed(const Door& door, int error);
  bool send_off(const Door& door);
  std::optional<int> who_makes_room();
  void hear(int fd);
  void dismiss(int fd, const std::string& why);
  void dismiss_late();
  void rest(Time until, bool full);
  void reopen();
  const Door* door_of(int fd) const;

  const Identity& me_;
  const Admit admit_;
  Fd epoll_;
  Fd spare_;  // given up for a moment to tell a caller that there are no descriptors left
  std::vector<Door> doors_;
  std::map<int, PendingConnection> pending_;
  bool resting_ = false;     // nobody is accepted
  bool rests_full_ = false;  // until there is a place, but at most
  Time rests_until_{};
};

}  // namespace dicomm
