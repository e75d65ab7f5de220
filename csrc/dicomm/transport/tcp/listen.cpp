#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>
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

// Whether others may reach this host there. A link-local address means something else on each link.
bool leads_here(const sockaddr* address) {
  if (!address || is_loopback(*address)) return false;
  if (address->sa_family == AF_INET) return true;
  return address->sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  const bool known =
      ::getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0;
  return known ? host : "";
}

// This host's address on the way to another network; empty where none leads there.
std::string address_towards(const char* network) {
  const Addresses far = resolve(network, 9, AI_NUMERICHOST);
  if (!far) return "";
  const Fd probe(::socket(far->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  auto* address = reinterpret_cast<sockaddr*>(&own);
  // Connecting chooses a route, and sends nothing.
  if (!probe || ::connect(probe.get(), far->ai_addr, far->ai_addrlen) != 0 ||
      ::getsockname(probe.get(), address, &length) != 0 || !leads_here(address))
    return "";
  return numeric(address, length);
}

struct Interface {
  std::string name, address;
  bool ipv6 = false;
  bool bridge = false;  // docker0, say, behind which no other machine is
};

// Asked of the kernel, as a container's /sys may be another one's.
bool is_bridge(const char* name) {
  const Fd any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ethtool_drvinfo driver{};
  driver.cmd = ETHTOOL_GDRVINFO;
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&driver);
  return any && ::ioctl(any.get(), SIOCETHTOOL, &request) == 0 &&
         std::string_view(driver.driver) == "bridge";
}

// Those that are up, as often as they have addresses: the likelier ones to lead elsewhere first.
std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  std::vector<Interface> found;
  for (const ifaddrs* at = first; at; at = at->ifa_next) {
    if (!(at->ifa_flags & IFF_UP) || !leads_here(at->ifa_addr)) continue;
    const bool ipv6 = at->ifa_addr->sa_family == AF_INET6;
    const socklen_t length = ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    found.push_back({at->ifa_name, numeric(at->ifa_addr, length), ipv6, is_bridge(at->ifa_name)});
  }
  ::freeifaddrs(first);
  std::stable_sort(found.begin(), found.end(), [](const Interface& a, const Interface& b) {
    return std::pair(a.bridge, a.ipv6) < std::pair(b.bridge, b.ipv6);
  });
  return found;
}

// Where other machines may reach this one, the likeliest first.
std::vector<std::string> likely_addresses() {
  std::vector<std::string> likely, inner;
  const auto add = [&likely](const std::string& address) {
    if (!address.empty()) likely.push_back(address);
  };
  const std::vector<Interface> all = interfaces();
  for (const Interface& each : all)
    if (each.bridge) inner.push_back(each.address);
  // Many hosts call themselves 127.0.1.1, where no other machine reaches them.
  const Addresses named = resolve(host_name(), 0, 0);
  for (const addrinfo* at = named.get(); at; at = at->ai_next)
    if (leads_here(at->ai_addr)) add(numeric(at->ai_addr, at->ai_addrlen));
  std::erase_if(likely, [&](const std::string& address) {
    return std::find(inner.begin(), inner.end(), address) != inner.end();
  });
  add(address_towards("192.0.2.1"));  // networks of nobody: they are for documentation
  add(address_towards("2001:db8::1"));
  for (const Interface& each : all) add(each.address);
  add("127.0.0.1");
  return likely;
}

// A variable's choice of interfaces: names with commas between them. NCCL's are the beginnings of
// names, but for "=" before them; "^" before them means all others.
struct Choice {
  const char* variable = nullptr;
  std::string value;

  bool takes(const std::string& name) const {
    std::string_view rest = value;
    const auto eat = [&rest](char sign) {
      if (!rest.starts_with(sign)) return false;
      rest.remove_prefix(1);
      return true;
    };
    const bool others = eat('^');
    const bool exact = eat('=') || std::string_view(variable) != "NCCL_SOCKET_IFNAME";
    while (!rest.empty()) {
      const std::string_view one = rest.substr(0, rest.find(','));
      if (!one.empty() && (exact ? name == one : name.starts_with(one))) return !others;
      rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    }
    return others;
  }
};

// Empty where no variable chooses.
std::vector<std::string> chosen_addresses() {
  for (const char* variable :
       {"DICOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    const char* value = std::getenv(variable);
    if (!value || !*value) continue;
    const Choice choice{variable, value};
    std::vector<std::string> addresses;
    std::string there;
    for (const Interface& each : interfaces()) {
      if (choice.takes(each.name)) addresses.push_back(each.address);
      there += text(there.empty() ? "" : ", ", each.name, " (", each.address, ")");
    }
    if (choice.takes("lo")) addresses.push_back("127.0.0.1");
    if (addresses.empty())
      throw Error(text(variable, " is ", value, ", and no network interface of that name has an ",
                       "address; expected one of lo", there.empty() ? "" : ", ", there));
    return addresses;
  }
  return {};
}

}  // namespace

TcpListener tcp_listen(const std::string& host) {
  std::vector<std::string> candidates{host};
  if (host.empty()) candidates = chosen_addresses();
  if (candidates.empty()) candidates = likely_addresses();
  std::string failures;
  for (const std::string& candidate : candidates) {
    int error = 0;
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
    failures += text(failures.empty() ? "cannot listen on '" : ", on '", candidate,
                     "': ", error ? system_error(error) : "the name does not resolve");
  }
  throw Error(failures);
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
