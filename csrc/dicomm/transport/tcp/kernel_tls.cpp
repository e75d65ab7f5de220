#include "transport/tcp/kernel_tls.h"

#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/communicator.h"
#include "core/fd.h"
#include "core/text.h"

#ifndef SOL_TLS
#define SOL_TLS 282
#endif

namespace dicomm {

namespace {

// One direction's key, and the secret that its nonces are made of.
tls12_crypto_info_aes_gcm_128 keys_of(const Digest& session, bool dialler_writes) {
  const std::string_view secret(reinterpret_cast<const char*>(session.data()), session.size());
  const Digest made =
      hmac_sha256(secret, dialler_writes ? "the dialler's kernel" : "the acceptor's kernel");
  tls12_crypto_info_aes_gcm_128 keys{};
  static_assert(sizeof made >= sizeof keys.key + sizeof keys.salt + sizeof keys.iv);
  keys.info.version = TLS_1_3_VERSION;
  keys.info.cipher_type = TLS_CIPHER_AES_GCM_128;
  std::memcpy(keys.key, made.data(), sizeof keys.key);
  std::memcpy(keys.salt, made.data() + sizeof keys.key, sizeof keys.salt);
  std::memcpy(keys.iv, made.data() + sizeof keys.key + sizeof keys.salt, sizeof keys.iv);
  return keys;
}

// False, with errno, where the kernel refuses.
bool encrypt(int socket, const Digest& session, bool dialled) {
  const auto writing = keys_of(session, dialled), reading = keys_of(session, !dialled);
  return ::setsockopt(socket, IPPROTO_TCP, TCP_ULP, "tls", sizeof "tls") == 0 &&
         ::setsockopt(socket, SOL_TLS, TLS_TX, &writing, sizeof writing) == 0 &&
         ::setsockopt(socket, SOL_TLS, TLS_RX, &reading, sizeof reading) == 0;
}

// A firewall may drop what goes over loopback.
void wait_briefly(const Fd& socket) {
  const timeval longest{0, 200'000};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof longest);  // connect()
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest);  // accept4()
}

// Two ends of a connection over loopback.
bool connect_to_self(Fd& dialler, Fd& acceptor) {
  const Fd door(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  dialler = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  wait_briefly(door);
  wait_briefly(dialler);
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const address = reinterpret_cast<sockaddr*>(&here);
  socklen_t length = sizeof here;
  if (!door || !dialler || ::bind(door.get(), address, length) != 0 ||
      ::getsockname(door.get(), address, &length) != 0 || ::listen(door.get(), 1) != 0 ||
      ::connect(dialler.get(), address, length) != 0)
    return false;
  acceptor = Fd(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return static_cast<bool>(acceptor);
}

bool tried() {
  Fd dialler, acceptor;
  return connect_to_self(dialler, acceptor) && encrypt(dialler.get(), Digest{}, true) &&
         encrypt(acceptor.get(), Digest{}, false);
}

}  // namespace

bool kernel_tls_allowed() {
  const char* value = std::getenv("DICOMM_KTLS");
  const std::string_view word = value && *value ? value : "on";
  if (word != "on" && word != "off")
    throw Error(text("DICOMM_KTLS is '", word, "', expected on or off"));
  return word == "on";
}

bool kernel_tls_works() {
  static const bool works = tried();
  return works;
}

void encrypt_in_kernel(int socket, const Digest& session, bool dialled) {
  if (!encrypt(socket, session, dialled))
    throw Error(text("the kernel does not encrypt this connection (", system_error(errno),
                     "); DICOMM_KTLS=off leaves it to OpenSSL"));
}

}  // namespace dicomm
