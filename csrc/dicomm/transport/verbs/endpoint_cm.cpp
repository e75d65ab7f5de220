// The part of a connection's making that rdma_cm does, and what becomes of it where that fails.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "core/text.h"
#include "transport/verbs/endpoint.h"

namespace dicomm::verbs {

namespace {

// Answers come in milliseconds. Where none does (a firewall, say) the cards do as well.
constexpr std::chrono::seconds kCmTimeout{1};

void send_byte(const Fd& socket, std::uint8_t byte) {
  if (::send(socket.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) != 1)
    throw Error(text("it hung up while its queue pairs were connected: ", system_error(errno)));
}

// Nothing: it has not come yet.
std::optional<std::uint8_t> receive_byte(const Fd& socket) {
  std::uint8_t byte;
  const ssize_t got = ::recv(socket.get(), &byte, 1, MSG_DONTWAIT);
  if (got == 1) return byte;
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  throw Error("it hung up while its queue pairs were connected");
}

}  // namespace

void Endpoint::listen() {
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (!links_[i] || card_.rail[i].connect == Connect::bootstrap) continue;
    try {
      if (!cm_) cm_ = std::make_unique<CmMeeting>(rails_->cm);
      cm_->listen(i, *links_[i], card_.rail[i]);
    } catch (const Error& error) {
      give_up_cm(i, error.what());
    }
  }
  if (cm_ && cm_->empty()) cm_.reset();
}

// Throws Error where a side will not do without.
void Endpoint::give_up_cm(std::size_t rail, const std::string& reason) {
  const std::string name = links_[rail]->describe();
  if (card_.rail[rail].connect == Connect::cm)
    throw Error(text("connect 'cm' was asked for, but rail ", name, " cannot: ", reason));
  if (!(rails_->cm_failed.fetch_or(1u << rail) >> rail & 1))
    std::fprintf(stderr,
                 "dicomm: rdma_cm cannot connect rail %s (%s); from here on it is connected by "
                 "exchange over the bootstrap\n",
                 name.c_str(), reason.c_str());
}

void Endpoint::call(const Fd& socket, const Deadline& deadline) {
  const Deadline little{std::min(deadline.at, std::chrono::steady_clock::now() + kCmTimeout),
                        deadline.called_off};
  while (cm_->calling() && (insists_on_cm() ? deadline : little).wait(cm_->fd(), POLLIN))
    cm_->advance();
  std::uint8_t connected = 0;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (!cm_->has(i)) continue;
    if (const auto* route = cm_->route(i)) {
      links_[i]->connect(theirs_.rail[i], *route, cm_->id(i));
      cm_->establish(i);
      connected |= 1 << i;
    } else {
      give_up_cm(i, cm_->failure(i));
      links_[i]->connect(theirs_.rail[i]);
    }
  }
  send_byte(socket, connected);
  while (!receive_byte(socket))
    if (!deadline.wait(socket.get(), POLLIN))
      throw Error("it did not connect its queue pairs in time");
  cm_.reset();
}

void Endpoint::answer(const Fd& socket, const Deadline& deadline) {
  std::optional<std::uint8_t> connected;
  while (!(connected = receive_byte(socket))) {
    if (deadline.called_off || std::chrono::steady_clock::now() > deadline.at)
      throw Error("a caller did not connect its queue pairs in time");
    pollfd waiting[] = {{socket.get(), POLLIN, 0}, {cm_->fd(), POLLIN, 0}};
    constexpr int turn_ms = 100;
    ::poll(waiting, 2, turn_ms);
    cm_->advance();
  }
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (!cm_->has(i)) continue;
    const auto* route = cm_->route(i);
    if (!(*connected >> i & 1))
      links_[i]->connect(theirs_.rail[i]);
    else if (route)
      links_[i]->connect(theirs_.rail[i], *route, cm_->id(i));
    else
      throw Error("a caller says that rdma_cm connected a rail that it did not call");
  }
  cm_.reset();
  caller_waits_ = true;
}

void Endpoint::dismiss(const Fd& socket) {
  if (std::exchange(caller_waits_, false)) send_byte(socket, 1);
}

bool Endpoint::insists_on_cm() const {
  return std::any_of(card_.rail, card_.rail + kMaxRails,
                     [](const RailCard& rail) { return rail.connect == Connect::cm; });
}

}  // namespace dicomm::verbs
