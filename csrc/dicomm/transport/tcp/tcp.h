// TCP: listening, dialling, and the stream over a connected socket.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "core/deadline.h"
#include "core/fd.h"
#include "core/stream.h"

namespace dicomm {

// A machine that says nothing for this long, though it was asked, has vanished: it lost its power,
// or the network to it. A process that is stopped is not silent, its kernel answers.
constexpr std::chrono::seconds kSilence{30};

// After an outage what was lost is sent again within this time. The kernel's own pauses double, so
// that an outage would cost up to twice its length. After 15 repeats, at 39 s, the kernel gives up:
// it must not do so before kSilence.
constexpr std::chrono::milliseconds kLongestRepeatPause{3000};

// A stream reads ahead this much, so that a header and a short payload, of 16 KiB, cost one system
// call. Of a longer payload so much is copied twice.
constexpr std::size_t kReadAheadBytes = 20 << 10;

struct TcpListener {
  Fd fd;
  std::string address;  // numeric
  int port = 0;
};

// host: empty for the address of the interface that DICOMM_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or
// NCCL_SOCKET_IFNAME names; without these that which this host's name resolves to, else that of its
// default route, else of a network interface, a bridge's last; where there is none, loopback.
// Throws Error.
TcpListener tcp_listen(const std::string& host);
// Throws Error; TurnedAway where this rank has no descriptors.
Fd tcp_connect(const std::string& address, int port, const Deadline& deadline);
// Whether what is sent never leaves this host: both ends have one address.
bool leads_to_this_host(int socket);
// protection: what the kernel does to what passes, as LinkDescription has it.
std::unique_ptr<Stream> tcp_stream(Fd socket, std::string protection = {});

class TransportFactory;
const TransportFactory& tcp_transport();

}  // namespace dicomm
