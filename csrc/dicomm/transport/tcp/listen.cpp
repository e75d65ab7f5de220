#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

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

// -1 with errno where the address is not this host's.
int listen_on(const addrinfo& address) {
  Fd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return -1;
  if (::bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0) return -1;
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

// The IPv4 addresses of this host's network interfaces, where other machines may reach it.
std::vector<std::string> interface_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  std::vector<std::string> found;
  for (const ifaddrs* at = first; at; at = at->ifa_next) {
    char host[NI_MAXHOST];
    if (at->ifa_addr && at->ifa_addr->sa_family == AF_INET && (at->ifa_flags & IFF_UP) &&
        !is_loopback(*at->ifa_addr) &&
        ::getnameinfo(at->ifa_addr, sizeof(sockaddr_in), host, sizeof host, nullptr, 0,
                      NI_NUMERICHOST) == 0)
      found.push_back(host);
  }
  ::freeifaddrs(first);
  return found;
}

}  // namespace

TcpListener tcp_listen(const std::string& host) {
  int error = 0;
  std::vector<std::string> candidates{host};
  if (host.empty()) {
    candidates = interface_addresses();
    candidates.insert(candidates.begin(), host_name());
    candidates.push_back("127.0.0.1");
  }
  for (const std::string& candidate : candidates) {
    const Addresses addresses = resolve(candidate, 0, 0);
    for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
      // Many hosts call themselves 127.0.1.1, where no other machine reaches them.
      if (host.empty() && is_loopback(*at->ai_addr) && candidate != candidates.back()) continue;
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

Fd tcp_connect(const std::string& host, int port, const Patience& patience) {
  const Addresses addresses = resolve(host, port, AI_NUMERICHOST);
  if (!addresses) throw Error(text("'", host, "' is not a numeric address"));
  const addrinfo& address = *addresses;
  Fd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw Error(text("cannot make a socket: ", system_error(errno)));
  int error = 0;
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) throw Error(system_error(errno));
    if (!patience.wait(fd.get(), POLLOUT)) throw Error("no answer to the connection request");
    socklen_t length = sizeof error;
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw Error(system_error(error));
  }
  return fd;
}

}  // namespace dicomm
