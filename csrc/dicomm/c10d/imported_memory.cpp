#include "imported_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace dicomm {

namespace {

using SteadyClock = std::chrono::steady_clock;

struct Import {
  const ChipMemory* memory;
  c10::DeviceIndex device;
  std::array<std::uint8_t, 64> allocation;
  std::int64_t process;  // whose it is
  void* address;
  StreamMark used_until;
  SteadyClock::time_point used_at;
};

struct Imports {
  std::mutex mutex;
  std::deque<Import> kept;  // the one used last comes first
};

Imports& imports() {
  static auto* imports = new Imports();  // never destroyed: messages may outlive every static
  return *imports;
}

// Made if there is none; comes first then.
Import& find(Imports& all, const ChipMemory& memory, c10::DeviceIndex device,
             const MemoryHandle& handle) {
  const auto found = std::find_if(all.kept.begin(), all.kept.end(), [&](const Import& import) {
    return import.memory == &memory && import.device == device &&
           import.allocation == handle.allocation;
  });
  if (found == all.kept.end())
    all.kept.push_front({&memory,
                         device,
                         handle.allocation,
                         handle.process,
                         memory.import(device, handle),
                         {},
                         {}});
  else
    std::rotate(all.kept.begin(), found, std::next(found));
  return all.kept.front();
}

std::vector<Import> take_unused(std::chrono::seconds kept) {
  const auto now = SteadyClock::now();
  Imports& all = imports();
  std::lock_guard lock(all.mutex);
  std::vector<Import> unused;
  std::deque<Import> used;
  std::map<std::int64_t, std::size_t> used_of;  // by process
  for (Import& import : all.kept) {
    const bool is_old = used_of[import.process] >= kMostImports || now - import.used_at >= kept;
    if (is_old && import.used_until.is_surely_reached()) {
      unused.push_back(std::move(import));
      continue;
    }
    ++used_of[import.process];
    used.push_back(std::move(import));
  }
  all.kept = std::move(used);
  return unused;
}

}  // namespace

void warn_of_the_longer_way(const c10::Error& error) {
  TORCH_WARN_ONCE(error.what_without_backtrace(), "; messages go through the host's memory");
}

// Under the mutex throughout: what is looked for here is not released before its use has a mark.
StreamMark use_imported_memory(const ChipMemory& memory, c10::DeviceIndex device,
                               const MemoryHandle& handle,
                               const std::function<StreamMark(const void*)>& use) {
  Imports& all = imports();
  std::lock_guard lock(all.mutex);
  Import& import = find(all, memory, device, handle);
  import.used_at = SteadyClock::now();
  return import.used_until =
             use(static_cast<const std::byte*>(import.address) + handle.offset_bytes);
}

// Nobody can do anything about memory that cannot be let go of: it is the chip's until the end.
void release_unused_imports(std::chrono::seconds kept) {
  for (const Import& import : take_unused(kept)) try {
      import.memory->release(import.device, import.address);
    } catch (const c10::Error& error) {
      TORCH_WARN_ONCE(error.what_without_backtrace());
    }
}

}  // namespace dicomm
