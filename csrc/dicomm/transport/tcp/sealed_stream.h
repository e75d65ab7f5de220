// A stream whose bytes travel in records, each with a tag that only a holder of the connection's
// keys can make.
//
//   record:  u32 length of the body, body, 16 bytes of tag
//
// The tag covers the length, the body, and the record's number in its direction, so that nothing
// can be changed, left out, repeated or put in between.
#pragma once

#include <memory>

#include "core/sha256.h"
#include "core/stream.h"
#include "transport/tcp/aead.h"

namespace dicomm {

struct SealedOptions {
  Digest session;  // a secret of this connection, known to both ends alone
  bool dialled;    // this side did
  bool encrypted;
  Cipher cipher = Cipher::aes_128_gcm;
};

// Throws Error.
std::unique_ptr<Stream> sealed_stream(std::unique_ptr<Stream> stream, const SealedOptions& options);

}  // namespace dicomm
