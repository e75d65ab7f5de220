// What protects the bytes of a TCP connection once both sides have proven who they are.
#pragma once

#include <cstdint>
#include <string>

#include "core/handshake.h"
#include "core/stream.h"
#include "transport/tcp/aead.h"

namespace dicomm {

enum class Security : std::uint32_t {
  by_place = 0,  // integrity between hosts, none inside of one
  none,
  integrity,   // what was changed, left out, repeated or put in on the way ends the connection
  encryption,  // and nobody on the way can read it
};

// What DICOMM_SECURITY says. Throws Error.
Security wanted_security();

// What one side tells the other in the handshake, which proves it.
struct SecurityCard {
  std::uint32_t verbs_version = 0;  // verbs' callers come to the same door, and theirs is not 0
  Security wanted = Security::by_place;
  Digest host{};  // of its host's id
  bool fast_aes = true;
  bool kernel_tls = false;  // its kernel can encrypt

  static SecurityCard of(Security wanted);
  static SecurityCard read(const TransportCard& card);
  TransportCard write() const;
};

struct Protection {
  Security security;
  Cipher cipher;
  bool in_kernel;
};

// What both sides come to. Throws Error where they want different things.
Protection agreed_protection(const SecurityCard& own, const SecurityCard& peers);

// How a stream ends whose bytes are not what the peer sealed.
StreamEnd tampered();

}  // namespace dicomm
