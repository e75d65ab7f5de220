// The ciphers of OpenSSL's libcrypto, which is loaded when the first connection needs it: so that
// building needs no headers of it, and a machine without it loses nothing else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/sha256.h"

namespace dicomm {

using Tag = std::array<std::uint8_t, 16>;

// Both take nonces of 12 bytes, and give tags of 16.
enum class Cipher { aes_128_gcm, chacha20_poly1305 };

// The name of a cipher, as standards write it.
const char* name_of(Cipher cipher);

// Whether this processor is quick with AES: one without instructions for it takes several times
// as long as for ChaCha20. Measured once, in less than a millisecond. True where a cipher is
// missing.
bool aes_is_fast();

// One direction of one connection: records, one after another, each with a nonce of its own. Its
// functions throw StreamEnd where libcrypto fails.
class Aead {
 public:
  enum class Use { seal, open };

  // key: known to both ends, and of this direction alone; of AES its first half. Throws Error where
  // there is no libcrypto.
  Aead(Cipher cipher, const Digest& key, Use use);

  // Begins the next record.
  void begin();
  // Bytes of the record that are not encrypted; all of these come before the others.
  void cover(const void* data, std::size_t bytes);
  // Bytes that are; to: where the result goes, which may be `from`.
  void convert(const void* from, std::size_t bytes, void* to);
  // Ends a record that is sealed.
  Tag tag();
  // Ends a record that is opened. False: it is not what the peer sealed at this place.
  bool genuine(const Tag& tag);

 private:
  struct Free {
    void operator()(void* context) const;
  };

  std::unique_ptr<void, Free> context_;
  Use use_;
  std::uint64_t records_ = 0;
};

}  // namespace dicomm
