#include "imported_memory.h"

#include <algorithm>
#include <deque>
#include <mutex>

namespace dicomm {

namespace {

// An allocation that its owner freed stays in the chip's memory while it is imported somewhere, and
// nobody tells: so not many are kept.
constexpr std::size_t kMostImports = 16;

struct Import {
  const ChipMemory* memory;
  c10::DeviceIndex device;
  std::array<std::uint8_t, 64> allocation;
  void* address;
};

struct Imports {
  std::mutex mutex;
  std::deque<Import> kept;  // the one used last comes first
};

Imports& imports() {
  static auto* imports = new Imports();  // never destroyed: messages may outlive every static
  return *imports;
}

}  // namespace

const void* imported_memory(const ChipMemory& memory, c10::DeviceIndex device,
                            const MemoryHandle& handle) {
  Imports& all = imports();
  std::lock_guard lock(all.mutex);
  auto found = std::find_if(all.kept.begin(), all.kept.end(), [&](const Import& import) {
    return import.memory == &memory && import.device == device &&
           import.allocation == handle.allocation;
  });
  Import import;
  if (found != all.kept.end()) {
    import = *found;
    all.kept.erase(found);
  } else {
    import = {&memory, device, handle.allocation, memory.import(device, handle)};
  }
  all.kept.push_front(import);
  if (all.kept.size() > kMostImports) {
    const Import oldest = all.kept.back();
    all.kept.pop_back();
    oldest.memory->release(oldest.device, oldest.address);
  }
  return static_cast<const std::byte*>(import.address) + handle.offset_bytes;
}

}  // namespace dicomm
