// The runtime ABI copies from any host memory alike and has no way to lock some: what is left is to
// remember which memory torch asked for as pinned, because scripts ask is_pinned().
#include "runtime/pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "runtime/vendor.h"

namespace ditorch {
namespace {

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, size_t> bytes_of;  // start -> bytes
};

Blocks& blocks() {
  static auto* blocks = new Blocks();  // never destroyed: tensors may outlive every static
  return *blocks;
}

void free_block(void* data) {
  {
    std::lock_guard lock(blocks().mutex);
    blocks().bytes_of.erase(reinterpret_cast<uintptr_t>(data));
  }
  c10::GetCPUAllocator()->raw_deallocate(data);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    if (data) {
      std::lock_guard lock(blocks().mutex);
      blocks().bytes_of[reinterpret_cast<uintptr_t>(data)] = bytes;
    }
    return {data, data, &free_block, at::DeviceType::CPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  // Nothing is cached, and the runtime's copies have read the host's memory when they return.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

void register_pinned_allocator() {
  at::setHostAllocator(kChip, static_cast<at::HostAllocator*>(pinned_allocator()));
}

bool is_pinned(const void* data) {
  auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard lock(blocks().mutex);
  auto after = blocks().bytes_of.upper_bound(address);
  if (after == blocks().bytes_of.begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return address < start + bytes || address == start;
}

}  // namespace ditorch
