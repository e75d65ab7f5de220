#include "transport/shm/peer_memory.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

namespace dicomm {

namespace {

using TransferCall = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                                 unsigned long);

// The kernel stops short where a page of either side is not there, and fails at the next call.
bool move(TransferCall call, pid_t pid, std::byte* here, std::uint64_t there, std::size_t bytes) {
  if (pid <= 0) return false;
  while (bytes > 0) {
    const iovec local{here, bytes}, remote{reinterpret_cast<void*>(there), bytes};
    const ssize_t moved = call(pid, &local, 1, &remote, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    here += moved;
    there += moved;
    bytes -= moved;
  }
  return true;
}

}  // namespace

// The kernel's word, not the peer's.
PeerMemory::PeerMemory(const Fd& socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0) pid_ = peer.pid;
}

void PeerMemory::allow_peers() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

bool PeerMemory::read(void* into, std::uint64_t address, std::size_t bytes) const {
  return move(::process_vm_readv, pid_, static_cast<std::byte*>(into), address, bytes);
}

bool PeerMemory::write(const void* from, std::uint64_t address, std::size_t bytes) const {
  return move(::process_vm_writev, pid_, static_cast<std::byte*>(const_cast<void*>(from)), address,
              bytes);
}

}  // namespace dicomm
