#include "core/poller.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "core/communicator.h"
#include "core/text.h"

namespace dicomm {

namespace {

epoll_event wanted(Poller::Source source, int which, std::uint32_t events) {
  epoll_event result{};
  result.events = events;
  result.data.u64 = static_cast<std::uint64_t>(source) << 32 | static_cast<std::uint32_t>(which);
  return result;
}

}  // namespace

Poller::Poller()
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wakeup_) throw Error(text("no file descriptors left: ", system_error(errno)));
  watch(wakeup_.get(), Source::wakeup);
}

void Poller::watch(int fd, Source source, int which) {
  epoll_event reading = wanted(source, which, EPOLLIN);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &reading);
}

void Poller::watch_writable(int fd, int rank, bool writable) {
  epoll_event changed = wanted(Source::peer, rank, writable ? EPOLLIN | EPOLLOUT : EPOLLIN);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &changed);
}

int Poller::sleep(Lock& lock, int timeout_ms) {
  sleeping_ = timeout_ms > 0;
  lock.unlock();
  const int count = ::epoll_wait(epoll_.get(), events_.data(), events_.size(), timeout_ms);
  lock.lock();
  sleeping_ = false;
  for (int i = 0; i < count; ++i)
    if (event(i).source == Source::wakeup) consume_wakeup();
  return count;
}

Poller::Event Poller::event(int i) const {
  const std::uint64_t data = events_[i].data.u64;
  return {static_cast<Source>(data >> 32), static_cast<int>(data & 0xffffffff)};
}

void Poller::write_wakeup() {
  const std::uint64_t one = 1;
  (void)!::write(wakeup_.get(), &one, sizeof one);
}

void Poller::consume_wakeup() {
  std::uint64_t count;
  (void)!::read(wakeup_.get(), &count, sizeof count);
}

}  // namespace dicomm
