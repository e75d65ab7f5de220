// TCP: listening, dialling, and the stream over a connected socket.
#pragma once

#include <memory>
#include <string>

#include "core/fd.h"
#include "core/patience.h"
#include "core/stream.h"

namespace dicomm {

struct TcpListener {
  Fd fd;
  std::string address;  // numeric
  int port = 0;
};

// host: empty for the address this host's name resolves to, or of a network interface where that
// is the loopback's; where there is none, loopback. Throws Error.
TcpListener tcp_listen(const std::string& host);
// Throws Error.
Fd tcp_connect(const std::string& address, int port, const Patience& patience);
std::unique_ptr<Stream> tcp_stream(Fd socket);

}  // namespace dicomm
