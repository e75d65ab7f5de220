#include "runtime/memory_watch.h"

#include <map>
#include <mutex>
#include <vector>

namespace ditorch {
namespace {

struct Region {
  std::int32_t device;
  std::uint64_t bytes;
};

struct Watch {
  std::mutex mutex;
  std::map<std::uint64_t, Region> held;  // by address
  std::vector<std::pair<MemoryFunction, MemoryFunction>> watchers;
};

Watch& watch() {
  static auto* watch = new Watch();  // never destroyed: tensors may outlive every static
  return *watch;
}

}  // namespace

void watch_memory(MemoryFunction taken, MemoryFunction returned) {
  std::lock_guard lock(watch().mutex);
  for (const auto& [address, region] : watch().held) taken(region.device, address, region.bytes);
  watch().watchers.emplace_back(taken, returned);
}

void memory_taken(std::int32_t device, void* pointer, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uint64_t>(pointer);
  std::lock_guard lock(watch().mutex);
  watch().held[address] = {device, bytes};
  for (const auto& [taken, returned] : watch().watchers) taken(device, address, bytes);
}

void memory_returned(void* pointer) {
  const auto address = reinterpret_cast<std::uint64_t>(pointer);
  std::lock_guard lock(watch().mutex);
  const auto found = watch().held.find(address);
  if (found == watch().held.end()) return;
  const auto [device, bytes] = found->second;
  for (const auto& [taken, returned] : watch().watchers) returned(device, address, bytes);
  watch().held.erase(found);
}

}  // namespace ditorch
