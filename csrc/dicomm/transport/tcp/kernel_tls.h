// Encryption by the kernel (kTLS): the records of TLS 1.3, with keys that both ends know already,
// so that a NIC which can do it may take the work from the processor.
#pragma once

#include "core/sha256.h"

namespace dicomm {

// Unless DICOMM_KTLS is off. Throws Error where it is neither on nor off.
bool kernel_tls_allowed();

// Whether this kernel does it: tried once, on a connection of this process with itself.
bool kernel_tls_works();

// From here on what is written to a connected TCP socket leaves encrypted, and what is read from it
// must have been. session: a secret of this connection; dialled: this side did. Throws Error.
void encrypt_in_kernel(int socket, const Digest& session, bool dialled);

}  // namespace dicomm
