#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/communicator.h"
#include "core/text.h"
#include "transport/shm/shm.h"

namespace dicomm {

namespace {

// Abstract names (a leading 0 byte) have no file and vanish with their socket.
socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.sun_path)
    throw Error(text("local socket name '", name, "' is too long"));
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

}  // namespace

LocalListener local_listen(int rank) {
  std::uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random)
    throw Error(text("no random numbers: ", system_error(errno)));
  LocalListener listener{Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
                         text("dicomm-", rank, "-", ::getpid(), "-", std::hex, random)};
  sockaddr_un address;
  const socklen_t length = abstract_address(listener.name, address);
  if (!listener.fd ||
      ::bind(listener.fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.fd.get(), SOMAXCONN) != 0)
    throw Error(text("cannot listen on a local socket: ", system_error(errno)));
  return listener;
}

Fd local_connect(const std::string& name, const Deadline& deadline) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw_no_socket(errno);
  const timeval turn{0, 100'000};  // connect() only waits where the listener's queue is full
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &turn, sizeof turn);
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  while (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno == ECONNREFUSED) throw NotThisHost(system_error(errno));
    if (errno != EAGAIN && errno != EINTR) throw Error(system_error(errno));
    if (!deadline.rest({})) throw Error("no answer to the connection request");
  }
  return fd;
}

}  // namespace dicomm
