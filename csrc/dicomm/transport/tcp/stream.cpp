#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/text.h"
#include "transport/tcp/security.h"
#include "transport/tcp/tcp.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44  // Linux 6.15; older ones refuse it, and their pauses grow
#endif

namespace dicomm {

namespace {

// How far a sender may be ahead of a receiver on the same host: little enough that the kernel's
// copy is still in the processor's cache when it is read. (The kernel doubles the figure, and takes
// no more than net.core.wmem_max.)
constexpr int kLocalSendBytes = 512 << 10;

// While a long message flows the next bytes are this near; to be woken for them costs more.
constexpr std::size_t kFlowBytes = 64 << 10;
constexpr std::chrono::microseconds kFlowPause{50};

constexpr int kUnanswered = 3;  // repeated segments or probes; one may only just have been sent

// Of the socket's own end, or the peer's.
template <class GetName>
std::string end_of(int socket, GetName get_name) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (get_name(socket, address, &length) != 0 ||
      ::getnameinfo(address, length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "?";
  return endpoint(host, port);
}

class TcpStream final : public Stream {
 public:
  TcpStream(Fd socket, std::string protection)
      : socket_(std::move(socket)),
        protection_(std::move(protection)),
        name_(text("its TCP connection from ", end_of(socket_.get(), ::getsockname), " to ",
                   end_of(socket_.get(), ::getpeername))),
        ahead_(kReadAheadBytes) {
    const int on = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // Not before it is connected: the kernel would give up a call sooner, too.
    const int longest_ms = static_cast<int>(kLongestRepeatPause.count());
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_RTO_MAX_MS, &longest_ms, sizeof longest_ms);
    if (local_)
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &kLocalSendBytes, sizeof kLocalSendBytes);
  }

  std::size_t write(const iovec* parts, int count) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return moved(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
    throw broken(errno);
  }

  std::size_t read(void* data, std::size_t bytes) override {
    if (bytes == 0) return 0;
    if (first_ == last_) {
      if (std::exchange(drained_, false)) return 0;
      if (bytes >= kReadAheadBytes) return receive(data, bytes);
      first_ = 0;
      last_ = receive(ahead_.data(), ahead_.size());
    }
    const std::size_t taken = std::min(bytes, last_ - first_);
    std::memcpy(data, ahead_.data() + first_, taken);
    first_ += taken;
    return taken;
  }

  // A message of this size that nobody awaits yet is cheaper to copy once more than to offer.
  std::size_t eager_bytes() const override { return 1 << 20; }
  LinkDescription describe() const override { return {"tcp", {}, protection_}; }
  int fd() const override { return socket_.get(); }
  bool watch_writable() const override { return true; }
  // What a process of this host sends is received by the kernel on the sender's core.
  bool peer_shares_core(int core) override {
    int sender_core = -1;
    socklen_t length = sizeof sender_core;
    return local_ &&
           ::getsockopt(socket_.get(), SOL_SOCKET, SO_INCOMING_CPU, &sender_core, &length) == 0 &&
           sender_core == core;
  }
  bool prepare_sleep(bool) override {
    if (first_ != last_) return false;
    if (flowing_ && Clock::now() - moved_at_ > kFlowPause) flowing_ = false;
    if (flowing_) ::sched_yield();  // the peer may be waiting for this core
    return !flowing_;
  }
  // The kernel goes on for a quarter of an hour while bytes are unacknowledged. TCP_USER_TIMEOUT
  // would also end the connection with a process that is stopped and whose window is full, although
  // its kernel answers each probe.
  void check_alive() override {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return;
    const int unanswered = std::max(info.tcpi_retransmits, info.tcpi_probes);
    if (unanswered >= kUnanswered && std::chrono::milliseconds(info.tcpi_last_ack_recv) >= kSilence)
      throw broken(ETIMEDOUT);
  }
  // A kernel that encrypts drops what it took and has yet to send. Nothing is lost as long as the
  // last record, a goodbye say, is one of its own: it is taken once all before it was sent.
  void finish_writing() override { ::shutdown(socket_.get(), SHUT_WR); }

 private:
  std::size_t receive(void* data, std::size_t bytes) {
    const ssize_t got = ::recv(socket_.get(), data, bytes, MSG_DONTWAIT);
    if (got > 0) {
      drained_ = static_cast<std::size_t>(got) < bytes;
      return moved(got);
    }
    if (got == 0) throw StreamEnd{name_ + " closed"};
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
    throw broken(errno);
  }

  // A machine that has vanished is not a process that died.
  StreamEnd broken(int error) const {
    // Where the kernel opens the records: a wrong tag, length or version.
    if (!protection_.empty() && (error == EBADMSG || error == EMSGSIZE || error == EINVAL))
      return tampered();
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH)
      return {text(name_, " got no answer for ", kSilence.count(),
                   " s: its machine or the network to it is gone"),
              false};
    return {text(system_error(error), " on ", name_)};
  }

  std::size_t moved(std::size_t bytes) {
    if (bytes >= kFlowBytes) {
      flowing_ = true;
      moved_at_ = Clock::now();
    }
    return bytes;
  }

  Fd socket_;
  const bool local_ = leads_to_this_host(socket_.get());
  const std::string protection_;
  const std::string name_;
  std::vector<char> ahead_;
  std::size_t first_ = 0, last_ = 0;
  bool drained_ = false;  // the last call took all there was: the next may be saved
  bool flowing_ = false;  // as of moved_at_
  Clock::time_point moved_at_;
};

}  // namespace

bool leads_to_this_host(int socket) {
  sockaddr_storage own{}, peers{};
  socklen_t own_length = sizeof own, peers_length = sizeof peers;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_length) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&peers), &peers_length) != 0)
    return false;
  if (own.ss_family != peers.ss_family) return false;
  if (own.ss_family == AF_INET)
    return reinterpret_cast<sockaddr_in&>(own).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in&>(peers).sin_addr.s_addr;
  return own.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<sockaddr_in6&>(own).sin6_addr,
                     &reinterpret_cast<sockaddr_in6&>(peers).sin6_addr, sizeof(in6_addr)) == 0;
}

std::unique_ptr<Stream> tcp_stream(Fd socket, std::string protection) {
  return std::make_unique<TcpStream>(std::move(socket), std::move(protection));
}

}  // namespace dicomm
