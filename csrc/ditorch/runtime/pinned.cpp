// The runtime ABI copies from any host memory alike and has no way to lock some. What is left is to
// remember which memory torch asked for as pinned, because scripts ask is_pinned(), and because a
// copy that nobody waits for may still write to it when its tensor is gone.
#include "runtime/pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "runtime/stream_uses.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

struct Block {
  size_t bytes;
  StreamUses uses;
};

struct Freed {
  void* data;
  StreamUses uses;
};

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, Block> held;  // by start
  std::vector<Freed> waiting;       // freed, but a stream may still write to them
};

Blocks& blocks() {
  static auto* blocks = new Blocks();  // never destroyed: tensors may outlive every static
  return *blocks;
}

// The block that `data` lies in; the caller holds the lock.
Block* find(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto after = blocks().held.upper_bound(address);
  if (after == blocks().held.begin()) return nullptr;
  auto& [start, block] = *std::prev(after);
  return address < start + block.bytes || address == start ? &block : nullptr;
}

// Returns to the host what no stream writes to any more; the caller holds the lock.
void collect() {
  std::erase_if(blocks().waiting, [](Freed& freed) {
    if (!freed.uses.finished(/*wait=*/false)) return false;
    c10::GetCPUAllocator()->raw_deallocate(freed.data);
    return true;
  });
}

void free_block(void* data) {
  std::lock_guard lock(blocks().mutex);
  collect();
  auto node = blocks().held.extract(reinterpret_cast<uintptr_t>(data));
  if (!node.empty() && node.mapped().uses.freed()) {
    blocks().waiting.push_back({data, std::move(node.mapped().uses)});
  } else {
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(blocks().mutex);
    collect();
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    if (data) blocks().held.emplace(reinterpret_cast<uintptr_t>(data), Block{bytes, {}});
    return {data, data, &free_block, at::DeviceType::CPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool record_event(void* data, void*, c10::Stream stream) override {
    return use_pinned(data, stream);
  }
  void empty_cache() override {
    std::lock_guard lock(blocks().mutex);
    collect();
  }
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
  std::lock_guard lock(blocks().mutex);
  return find(data) != nullptr;
}

bool use_pinned(const void* data, c10::Stream stream) {
  std::lock_guard lock(blocks().mutex);
  auto* block = find(data);
  if (!block) return false;
  block->uses.add(stream);
  return true;
}

}  // namespace ditorch
