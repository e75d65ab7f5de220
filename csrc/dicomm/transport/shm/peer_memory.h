// The memory of the process at the other end of a local socket, where the kernel lets this one read
// and write it: both run as the same user, and nothing (Yama, seccomp, a container) forbids it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "core/fd.h"

namespace dicomm {

class PeerMemory {
 public:
  // What a process keeps for its peer to find out whether it can.
  struct Probe {
    std::uint64_t word;
    std::uint64_t room;  // the peer writes here
  };

  explicit PeerMemory(const Fd& socket);

  // Lets any process of this user in where Yama would allow only a parent.
  static void allow_peers();

  // Whether all of it was moved. It is not, either, where the process has ended, of which its
  // socket tells for certain.
  bool read(void* into, std::uint64_t address, std::size_t bytes) const;
  bool write(const void* from, std::uint64_t address, std::size_t bytes) const;

 private:
  pid_t pid_ = 0;  // 0: not known here
};

}  // namespace dicomm
