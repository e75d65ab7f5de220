#include "core/lobby.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "core/text.h"

namespace dicomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPlaces = 256;
// How long a caller keeps its place while others wait for one.
constexpr std::chrono::milliseconds kSilentConnection{100};
constexpr std::chrono::milliseconds kGreetedConnection{1000};
constexpr int kCallersAtOnce = 64;  // then the job's own messages have their turn
constexpr std::chrono::milliseconds kRest{100};

constexpr const char* kTooSlow = "a caller was too slow to prove who it is";

Lobby::Time makes_room_at(const PendingConnection& pending) {
  return pending.since() + (pending.greeted() ? kGreetedConnection : kSilentConnection);
}

Fd spare_descriptor() { return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

Lobby::Lobby(const Identity& me, Admit admit)
    : me_(me),
      admit_(std::move(admit)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      spare_(spare_descriptor()) {
  if (!epoll_ || !spare_) throw Error(text("no file descriptors left: ", system_error(errno)));
}

void Lobby::watch(int fd) {
  epoll_event reading{};
  reading.events = EPOLLIN;
  reading.data.fd = fd;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &reading);
}

void Lobby::open(int listener, std::size_t door) {
  doors_.push_back({listener, door});
  watch(listener);
}

void Lobby::close() {
  pending_.clear();
  doors_.clear();
  epoll_ = Fd();
  spare_ = Fd();
}

Lobby::Time Lobby::wake_at() const {
  Time first = resting_ ? rests_until_ : Time::max();
  for (const auto& [fd, pending] : pending_) first = std::min(first, pending.deadline());
  return first;
}

const Lobby::Door* Lobby::door_of(int fd) const {
  const auto found =
      std::find_if(doors_.begin(), doors_.end(), [&](const Door& d) { return d.listener == fd; });
  return found == doors_.end() ? nullptr : &*found;
}

void Lobby::serve() {
  epoll_event events[kCallersAtOnce];
  const int count = ::epoll_wait(epoll_.get(), events, kCallersAtOnce, 0);
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    if (const Door* door = door_of(fd))
      accept_from(*door);
    else
      hear(fd);
  }
  dismiss_late();
  reopen();
}

void Lobby::accept_from(const Door& door) {
  for (int i = 0; i < kCallersAtOnce && !resting_; ++i) {
    const auto leaver = who_makes_room();
    if (resting_) return;
    Fd socket(::accept4(door.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (!accept_failed(door, errno)) return;
      continue;
    }
    if (leaver) dismiss(*leaver, kTooSlow);
    const int fd = socket.get();
    pending_.emplace(fd, PendingConnection(std::move(socket), door.number));
    watch(fd);
    hear(fd);  // often its hello is there already
  }
}

// Whether the next caller may be luckier.
bool Lobby::accept_failed(const Door& door, int error) {
  switch (error) {
    case EAGAIN:
      return false;
    case EMFILE:
    case ENFILE:
      if (send_off(door)) return true;
      [[fallthrough]];
    case ENOBUFS:
    case ENOMEM:
      rest(Clock::now() + kRest, false);
      return false;
    default:
      return true;  // this caller's own trouble
  }
}

// With the spare descriptor: a caller who is left in the queue would wait and never learn why.
bool Lobby::send_off(const Door& door) {
  spare_ = Fd();
  Fd socket(::accept4(door.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const bool sent_off = static_cast<bool>(socket);
  if (sent_off) {
    say_no_descriptors(socket, me_);
    last_refusal = kNoDescriptors;
  }
  socket = Fd();
  spare_ = spare_descriptor();
  return sent_off;
}

// Nobody while there is a place. While there is none and nobody has to go, no caller is accepted.
std::optional<int> Lobby::who_makes_room() {
  while (pending_.size() >= kPlaces) {
    const auto next = std::min_element(pending_.begin(), pending_.end(), [](auto& a, auto& b) {
      return makes_room_at(a.second) < makes_room_at(b.second);
    });
    const int fd = next->first;
    const auto now = Clock::now();
    if (makes_room_at(next->second) > now) {
      rest(makes_room_at(next->second), true);
      return std::nullopt;
    }
    hear(fd);  // it may have spoken while this process was held up
    const auto still = pending_.find(fd);
    if (still != pending_.end() && makes_room_at(still->second) <= now) return fd;
  }
  return std::nullopt;
}

void Lobby::hear(int fd) {
  const auto found = pending_.find(fd);
  if (found == pending_.end()) return;
  const auto state = found->second.advance(me_);
  if (state == PendingConnection::State::talking) return;
  if (state == PendingConnection::State::refused)
    return dismiss(fd, "a caller " + found->second.refusal());
  PendingConnection pending = std::move(found->second);
  pending_.erase(found);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  admit_(pending);
}

void Lobby::dismiss(int fd, const std::string& why) {
  last_refusal = why;
  pending_.erase(fd);
}

void Lobby::dismiss_late() {
  const auto now = Clock::now();
  std::vector<int> late;
  for (const auto& [fd, pending] : pending_)
    if (pending.deadline() <= now) late.push_back(fd);
  for (const int fd : late) {
    hear(fd);  // as above
    if (pending_.count(fd) > 0) dismiss(fd, kTooSlow);
  }
}

void Lobby::rest(Time until, bool full) {
  resting_ = true;
  rests_full_ = full;
  rests_until_ = until;
  for (const Door& door : doors_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, door.listener, nullptr);
}

void Lobby::reopen() {
  if (!resting_) return;
  const bool place = rests_full_ && pending_.size() < kPlaces;
  if (!place && Clock::now() < rests_until_) return;
  resting_ = false;
  for (const Door& door : doors_) watch(door.listener);
}

}  // namespace dicomm
