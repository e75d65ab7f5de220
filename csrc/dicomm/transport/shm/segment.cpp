#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/communicator.h"
#include "core/text.h"
#include "transport/shm/shm.h"
#include "transport/shm/stream.h"

namespace dicomm {

namespace {

constexpr std::size_t kLanesBytes = 2 * sizeof(Lane);  // the owner sends in the first
// Touching memory that the peer took away would end this process.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

// Its pages are made as they are written, as most peers' rings are never full. Who finds no memory
// then ends as wherever else the kernel has promised too much.
Fd make_segment() {
  Fd segment(::memfd_create("dicomm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment || ::ftruncate(segment.get(), kLanesBytes) != 0 ||
      ::fcntl(segment.get(), F_ADD_SEALS, kSeals) != 0)
    throw Error(
        text("cannot make ", kLanesBytes, " bytes of shared memory: ", system_error(errno)));
  return segment;
}

std::unique_ptr<Stream> shm_stream(Fd socket, Fd segment, bool owner) {
  const int seals = ::fcntl(segment.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw Error("the peer's shared memory is not sealed: it could be taken away while in use");
  struct stat status{};
  if (::fstat(segment.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != kLanesBytes)
    throw Error("the peer's shared memory has another size: another version?");
  void* memory = ::mmap(nullptr, kLanesBytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment.get(), 0);
  if (memory == MAP_FAILED) throw Error(text("cannot map shared memory: ", system_error(errno)));
  ::madvise(memory, kLanesBytes, MADV_DONTFORK);
  return std::make_unique<ShmStream>(std::move(socket), static_cast<Lane*>(memory), owner);
}

}  // namespace dicomm
