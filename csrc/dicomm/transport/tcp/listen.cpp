#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/communicator.h"
#include "core/host.h"
#include "core/text.h"
#include "transport/tcp/tcp.h"

namespace dicomm {

namespace {

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Addresses resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    found = nullptr;
  return {found, [](addrinfo* addresses) {
            if (addresses) ::freeaddrinfo(addresses);
          }};
}

// An idle connection ends once the peer's kernel has not answered for kSilence. Accepted sockets
// inherit it from the listening one.
void ask_for_life(const Fd& socket) {
  const int on = 1;
  const int idle_s = 10;
  const int interval_s = 5;
  const int unanswered = (static_cast<int>(kSilence.count()) - idle_s) / interval_s;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, &unanswered, sizeof unanswered);
}

// -1 with errno where the address is not this host's.
int listen_on(const addrinfo& address) {
  Fd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return -1;
  if (::bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0) return -1;
  ask_for_life(fd);
  if (::listen(fd.get(), SOMAXCONN) != 0) return -1;
  return ::dup(fd.get());
}

TcpListener named(Fd fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  if (::getsockname(fd.get(), address, &length) != 0 ||
      ::getnameinfo(address, length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    throw Error(text("cannot tell which port the listening socket has: ", system_error(errno)));
  return {std::move(fd), host, std::atoi(port)};
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  const bool known =
      ::getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0;
  return known ? host : "";
}

// This host's address on the way to other networks; empty where none leads there.
std::string default_address() {
  const Addresses far = resolve("192.0.2.1", 9, AI_NUMERICHOST);  // of nobody: for documentation
  const Fd probe(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in own{};
  socklen_t length = sizeof own;
  auto* address = reinterpret_cast<sockaddr*>(&own);
  // Connecting chooses a route, and sends nothing.
  if (!far || !probe || ::connect(probe.get(), far->ai_addr, far->ai_addrlen) != 0 ||
      ::getsockname(probe.get(), address, &length) != 0 || is_loopback(*address))
    return "";
  return numeric(address, length);
}

struct Interfaces {
  std::vector<std::string> addresses;  // IPv4
  std::vector<std::string> inner;      // those of bridges: of docker0, say, behind which no other
                                       // machine is
};

Interfaces interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  Interfaces found;
  for (const ifaddrs* at = first; at; at = at->ifa_next) {
    if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || !(at->ifa_flags & IFF_UP) ||
        is_loopback(*at->ifa_addr))
      continue;
    const bool bridge =
        ::access(text("/sys/class/net/", at->ifa_name, "/bridge").c_str(), F_OK) == 0;
    (bridge ? found.inner : found.addresses).push_back(numeric(at->ifa_addr, sizeof(sockaddr_in)));
  }
  ::freeifaddrs(first);
  return found;
}

// Where other machines may reach this one, the likeliest first.
std::vector<std::string> likely_addresses() {
  const Interfaces all = interfaces();
  const std::string by_default = default_address();
  std::vector<std::string> likely;
  // Many hosts call themselves 127.0.1.1, where no other machine reaches them.
  const Addresses named = resolve(host_name(), 0, 0);
  for (const addrinfo* at = named.get(); at; at = at->ai_next)
    if (!is_loopback(*at->ai_addr)) likely.push_back(numeric(at->ai_addr, at->ai_addrlen));
  likely.push_back(by_default);
  likely.insert(likely.end(), all.addresses.begin(), all.addresses.end());
  std::stable_partition(likely.begin(), likely.end(), [&](const std::string& address) {
    return std::find(all.inner.begin(), all.inner.end(), address) == all.inner.end() ||
           address == by_default;
  });
  likely.insert(likely.end(), all.inner.begin(), all.inner.end());
  likely.push_back("127.0.0.1");
  std::erase(likely, "");
  return likely;
}

}  // namespace

TcpListener tcp_listen(const std::string& host) {
  int error = 0;
  for (const std::string& candidate : host.empty() ? likely_addresses() : std::vector{host}) {
    const Addresses addresses = resolve(candidate, 0, 0);
    for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
      const int fd = listen_on(*at);
      if (fd < 0) {
        error = errno;
        continue;
      }
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
      return named(Fd(fd));
    }
  }
  throw Error(text("cannot listen on '", host,
                   "': ", error ? system_error(error) : "the name does not resolve"));
}

Fd tcp_connect(const std::string& host, int port, const Deadline& deadline) {
  const Addresses addresses = resolve(host, port, AI_NUMERICHOST);
  if (!addresses) throw Error(text("'", host, "' is not a numeric address"));
  const addrinfo& address = *addresses;
  Fd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw_no_socket(errno);
  ask_for_life(fd);
  int error = 0;
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) throw Error(system_error(errno));
    if (!deadline.wait(fd.get(), POLLOUT)) throw Error("no answer to the connection request");
    socklen_t length = sizeof error;
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw Error(system_error(error));
  }
  return fd;
}

}  // namespace dicomm
