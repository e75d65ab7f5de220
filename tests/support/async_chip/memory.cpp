// Device pointers lie in a range of addresses that nothing may touch; the bytes are in another
// range, which only the work of streams knows.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "chip.h"

namespace async_chip {

namespace {

constexpr std::size_t kAlignmentBytes = 64;
constexpr int kPoison = 0xFF;  // NaN in every floating dtype

struct Memory {
  std::mutex mutex;
  struct Held {
    std::size_t bytes, number;
  };
  std::map<std::size_t, Held> held;  // by offset
  std::size_t numbers = 0;           // of allocations, each of which has its own
  std::size_t used_bytes = 0;
  std::size_t copies_to_host = 0, most_bytes_to_host = 0;  // of them all, and of the largest
  const int file = nameless_file();
  char* addresses = map_memory(PROT_NONE);
  char* bytes = map_memory(PROT_READ | PROT_WRITE, file);

  // It is gone with the last process that maps it, however that ends.
  static int nameless_file() {
    const int file = memfd_create("async_chip", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kMemoryBytes) != 0) std::abort();
    return file;
  }

  // The first gap that is large enough, so that freed memory is used again soon.
  std::size_t find(std::size_t wanted) const {
    std::size_t begin = 0;
    for (const auto& [offset, piece] : held) {
      if (offset - begin >= wanted) break;
      begin = offset + piece.bytes;
    }
    return begin;
  }

  void count_to_host(std::size_t bytes) {
    std::lock_guard lock(mutex);
    ++copies_to_host;
    most_bytes_to_host = std::max(most_bytes_to_host, bytes);
  }

  bool holds(const void* pointer) const {
    return pointer >= addresses && pointer < addresses + kMemoryBytes;
  }
};

Memory& memory() {
  static auto* memory = new Memory();
  return *memory;
}

}  // namespace

void* bytes_behind(const void* device_pointer) {
  return memory().bytes + (static_cast<const char*>(device_pointer) - memory().addresses);
}

ditorch_status memory_allocate(std::int32_t, std::size_t bytes, void** pointer) {
  *pointer = nullptr;
  if (bytes == 0) return DITORCH_OK;
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (bytes > kMemoryBytes - all.used_bytes)
    return fail(DITORCH_OUT_OF_MEMORY, std::to_string(bytes) + " bytes were asked for");
  const std::size_t padded = (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  const std::size_t offset = all.find(padded);
  if (offset + padded > kMemoryBytes)
    return fail(DITORCH_OUT_OF_MEMORY, "no piece of " + std::to_string(bytes) + " bytes is free");
  all.held[offset] = {padded, ++all.numbers};
  all.used_bytes += padded;
  std::memset(all.bytes + offset, kPoison, padded);
  *pointer = all.addresses + offset;
  return DITORCH_OK;
}

ditorch_status memory_free(std::int32_t, void* pointer) {
  if (!pointer) return DITORCH_OK;
  synchronize_all();
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  const auto found = all.holds(pointer) ? all.held.find(static_cast<char*>(pointer) - all.addresses)
                                        : all.held.end();
  if (found == all.held.end()) return fail(DITORCH_INVALID, "a pointer that was not allocated");
  std::memset(all.bytes + found->first, kPoison, found->second.bytes);
  all.used_bytes -= found->second.bytes;
  all.held.erase(found);
  return DITORCH_OK;
}

ditorch_status memory_info(std::int32_t, std::size_t* free_bytes, std::size_t* total_bytes) {
  std::lock_guard lock(memory().mutex);
  *free_bytes = kMemoryBytes - memory().used_bytes;
  *total_bytes = kMemoryBytes;
  return DITORCH_OK;
}

ditorch_status memory_copy(std::int32_t, ditorch_stream* stream, void* destination,
                           const void* source, std::size_t bytes, ditorch_copy_kind kind) {
  if (bytes == 0) return DITORCH_OK;
  const bool to_chip = kind != DITORCH_COPY_DEVICE_TO_HOST;
  const bool from_chip = kind != DITORCH_COPY_HOST_TO_DEVICE;
  const void* imported = kind == DITORCH_COPY_DEVICE_TO_DEVICE ? imported_bytes(source) : nullptr;
  if (memory().holds(destination) != to_chip || (imported || memory().holds(source)) != from_chip)
    return fail(DITORCH_INVALID, "a copy whose kind does not fit its pointers");
  void* to = to_chip ? bytes_behind(destination) : destination;
  if (from_chip) {
    const void* from = imported ? imported : bytes_behind(source);
    if (!to_chip) memory().count_to_host(bytes);
    queue_of(stream).submit([=] { std::memcpy(to, from, bytes); });
  } else {  // the host may change the source at once
    const auto* begin = static_cast<const char*>(source);
    auto sent = std::make_shared<const std::vector<char>>(begin, begin + bytes);
    queue_of(stream).submit([=] { std::memcpy(to, sent->data(), bytes); });
  }
  return DITORCH_OK;
}

ditorch_status memory_export(std::int32_t, const void* pointer, ditorch_memory_handle* handle) {
  Memory& all = memory();
  std::lock_guard lock(all.mutex);
  if (!all.holds(pointer)) return fail(DITORCH_INVALID, "a pointer that was not allocated");
  const std::size_t offset = static_cast<const char*>(pointer) - all.addresses;
  const auto after = all.held.upper_bound(offset);
  if (after == all.held.begin()) return fail(DITORCH_INVALID, "a pointer to free memory");
  const auto& [begin, piece] = *std::prev(after);
  if (offset >= begin + piece.bytes) return fail(DITORCH_INVALID, "a pointer to free memory");
  describe_memory(handle, all.file, begin, piece.number);
  handle->offset_bytes = offset - begin;
  return DITORCH_OK;
}

// The file of all its memory stands for a dmabuf, which only a kernel's driver can make.
ditorch_status memory_peer_handle(std::int32_t, void* pointer, std::size_t bytes,
                                  ditorch_peer_handle* handle) {
  Memory& all = memory();
  if (!all.holds(pointer) || !all.holds(static_cast<char*>(pointer) + bytes - 1))
    return fail(DITORCH_INVALID, "a pointer that was not allocated");
  handle->kind = DITORCH_PEER_DMABUF;
  handle->fd = fcntl(all.file, F_DUPFD_CLOEXEC, 0);
  if (handle->fd < 0) return fail(DITORCH_ERROR, "no descriptor is left");
  handle->pointer = pointer;
  handle->offset_bytes = static_cast<char*>(pointer) - all.addresses;
  return DITORCH_OK;
}

}  // namespace async_chip

extern "C" std::size_t async_chip_copies_to_host(std::size_t* most_bytes) {
  auto& memory = async_chip::memory();
  std::lock_guard lock(memory.mutex);
  *most_bytes = memory.most_bytes_to_host;
  return memory.copies_to_host;
}
