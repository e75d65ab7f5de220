// Memory of other processes' chips: their files, mapped. As with the chip's own memory, pointers
// lie in a range of addresses that nothing may touch.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "chip.h"

namespace async_chip {

namespace {

struct Words {  // of a handle
  std::int64_t process, file;
  std::uint64_t inode, offset, number;
};
static_assert(sizeof(Words) <= sizeof ditorch_memory_handle::allocation);

struct Import {
  const char *addresses, *bytes;
  std::size_t offset;  // of the allocation
};

struct Imports {
  std::mutex mutex;
  std::vector<Import> live;
  std::size_t made = 0;
  std::size_t exports = 0;
};

Imports& imports() {
  static auto* imports = new Imports();
  return *imports;
}

std::uint64_t inode_of(int file) {
  struct stat status{};
  return fstat(file, &status) == 0 ? status.st_ino : 0;
}

}  // namespace

char* map_memory(int protection, int file) {
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* found = mmap(nullptr, kMemoryBytes, protection, flags, file, 0);
  if (found == MAP_FAILED) std::abort();
  return static_cast<char*>(found);
}

const void* imported_bytes(const void* device_pointer) {
  std::lock_guard lock(imports().mutex);
  for (const Import& import : imports().live)
    if (device_pointer >= import.addresses && device_pointer < import.addresses + kMemoryBytes)
      return import.bytes + (static_cast<const char*>(device_pointer) - import.addresses);
  return nullptr;
}

void describe_memory(ditorch_memory_handle* handle, int file, std::size_t offset,
                     std::size_t number) {
  const Words words{getpid(), file, inode_of(file), offset, number};
  std::memcpy(handle->allocation, &words, sizeof words);
  std::lock_guard lock(imports().mutex);
  ++imports().exports;
}

ditorch_status memory_import(std::int32_t, const ditorch_memory_handle* handle, void** pointer) {
  static const bool allowed = setting("ASYNC_CHIP_IMPORTS", 1);
  if (!allowed) return fail(DITORCH_ERROR, "ASYNC_CHIP_IMPORTS is 0");
  Words words;
  std::memcpy(&words, handle->allocation, sizeof words);
  const std::string path =
      "/proc/" + std::to_string(words.process) + "/fd/" + std::to_string(words.file);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0 || inode_of(file) != words.inode || words.offset >= kMemoryBytes) {
    if (file >= 0) close(file);
    return fail(DITORCH_INVALID, "no chip has this memory: " + path);
  }
  const Import import{map_memory(PROT_NONE), map_memory(PROT_READ, file), words.offset};
  close(file);
  std::lock_guard lock(imports().mutex);
  imports().live.push_back(import);
  ++imports().made;
  *pointer = const_cast<char*>(import.addresses) + import.offset;
  return DITORCH_OK;
}

ditorch_status memory_import_release(std::int32_t, void* pointer) {
  synchronize_all();
  std::lock_guard lock(imports().mutex);
  const auto gone = std::erase_if(imports().live, [&](const Import& import) {
    if (import.addresses + import.offset != pointer) return false;
    munmap(const_cast<char*>(import.addresses), kMemoryBytes);
    munmap(const_cast<char*>(import.bytes), kMemoryBytes);
    return true;
  });
  return gone ? DITORCH_OK : fail(DITORCH_INVALID, "a pointer that was not imported");
}

}  // namespace async_chip

// For tests: how many imports there were, and how many are live.
extern "C" std::size_t async_chip_imports(std::size_t* live) {
  std::lock_guard lock(async_chip::imports().mutex);
  *live = async_chip::imports().live.size();
  return async_chip::imports().made;
}

// For tests: how often memory was exported.
extern "C" std::size_t async_chip_exports() {
  std::lock_guard lock(async_chip::imports().mutex);
  return async_chip::imports().exports;
}
