#include "runtime/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/copy.h"
#include "runtime/memory_watch.h"
#include "runtime/stream.h"
#include "runtime/stream_uses.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kGranularityBytes = 512;

size_t round_up(size_t bytes) {
  if (bytes > SIZE_MAX - kGranularityBytes) return bytes;  // no chip has it; a sum would wrap
  return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

Stat& aggregate(StatArray& stat) { return stat[static_cast<size_t>(StatType::AGGREGATE)]; }

// One piece of the vendor's memory: handed out, waiting for other streams, or cached.
struct Block {
  void* pointer = nullptr;
  size_t capacity = 0;   // what the vendor gave
  size_t allocated = 0;  // what the tensor holds, rounded up
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;  // the stream it was allocated for; it is reused only there
  StreamUses uses;           // other streams that touch it
};

void free_pointer(void* pointer);

class ChipAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }

  c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
    if (bytes == 0) return {nullptr, chip_device(device)};
    std::lock_guard lock(mutex_);
    auto block = take(device, round_up(bytes));
    void* pointer = block->pointer;
    live_.emplace(pointer, std::move(block));
    return {pointer, pointer, &free_pointer, chip_device(device)};
  }

  // False if the pointer is not this allocator's.
  bool free(void* pointer) {
    std::lock_guard lock(mutex_);
    auto found = live_.find(pointer);
    if (found == live_.end()) return false;
    auto block = std::move(found->second);
    live_.erase(found);
    auto& stats = of(block->device).stats;
    aggregate(stats.allocation).decrease(1);
    aggregate(stats.allocated_bytes).decrease(block->allocated);
    aggregate(stats.requested_bytes).decrease(block->allocated);
    if (!block->uses.freed()) {
      cache(std::move(block));
      return true;
    }
    of(block->device).waiting.push_back(std::move(block));
    return true;
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    std::lock_guard lock(mutex_);
    auto found = live_.find(pointer.get());
    if (found == live_.end() || found->second->stream == stream.id()) return;
    found->second->uses.add(stream);
  }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex_);
    for (auto& [device, memory] : memories_) {
      collect(memory, true);
      release_cache(memory);
    }
  }

  bool initialized() override { return vendor().runtime != nullptr; }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return of(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t free_bytes = 0, total_bytes = 0;
    check(vendor().runtime->memory_info(device, &free_bytes, &total_bytes), "report its memory");
    return {free_bytes, total_bytes};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pointer; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    copy_on_chip(current_device(), destination, source, count);
  }

 private:
  using BlockPtr = std::unique_ptr<Block>;
  struct Memory {
    std::map<c10::StreamId, std::multimap<size_t, BlockPtr>> cached;  // by capacity
    std::vector<BlockPtr> waiting;  // freed, but another stream still reads or writes them
    DeviceStats stats;
  };

  Memory& of(c10::DeviceIndex device) { return memories_[device]; }

  // A block of at least `bytes`: from the cache, else from the vendor, else from the vendor
  // again once everything cached has been given back.
  BlockPtr take(c10::DeviceIndex device, size_t bytes) {
    auto& memory = of(device);
    collect(memory, false);
    auto block = take_cached(memory, current_stream(device).id(), bytes);
    if (!block) block = take_fresh(device, bytes);
    if (!block) {
      memory.stats.num_alloc_retries += 1;
      collect(memory, true);
      release_cache(memory);
      block = take_fresh(device, bytes);
    }
    if (!block) throw_out_of_memory(device, bytes);
    block->allocated = bytes;
    aggregate(memory.stats.allocation).increase(1);
    aggregate(memory.stats.active).increase(1);
    aggregate(memory.stats.allocated_bytes).increase(bytes);
    aggregate(memory.stats.requested_bytes).increase(bytes);
    aggregate(memory.stats.active_bytes).increase(block->capacity);
    return block;
  }

  // A cached block may be at most an eighth too large: the rest of it would lie idle.
  BlockPtr take_cached(Memory& memory, c10::StreamId stream, size_t bytes) {
    auto& pool = memory.cached[stream];
    auto found = pool.lower_bound(bytes);
    if (found == pool.end() || found->first > bytes + bytes / 8) return nullptr;
    auto block = std::move(found->second);
    pool.erase(found);
    return block;
  }

  BlockPtr take_fresh(c10::DeviceIndex device, size_t bytes) {
    auto block = std::make_unique<Block>();
    auto status = vendor().runtime->memory_allocate(device, bytes, &block->pointer);
    if (status == DITORCH_OUT_OF_MEMORY) return nullptr;
    check(status, "allocate memory");
    block->capacity = bytes;
    block->device = device;
    block->stream = current_stream(device).id();
    memory_taken(device, block->pointer, bytes);
    auto& stats = of(device).stats;
    stats.num_device_alloc += 1;
    aggregate(stats.segment).increase(1);
    aggregate(stats.reserved_bytes).increase(bytes);
    return block;
  }

  void cache(BlockPtr block) {
    auto& memory = of(block->device);
    aggregate(memory.stats.active).decrease(1);
    aggregate(memory.stats.active_bytes).decrease(block->capacity);
    memory.cached[block->stream].emplace(block->capacity, std::move(block));
  }

  // Moves freed blocks whose other streams have finished into the cache.
  void collect(Memory& memory, bool wait) {
    std::vector<BlockPtr> still_waiting;
    for (auto& block : memory.waiting) {
      if (block->uses.finished(wait)) {
        cache(std::move(block));
      } else {
        still_waiting.push_back(std::move(block));
      }
    }
    memory.waiting.swap(still_waiting);
  }

  void release_cache(Memory& memory) {
    for (auto& [stream, pool] : memory.cached) {
      for (auto& [capacity, block] : pool) {
        memory_returned(block->pointer);
        vendor().runtime->memory_free(block->device, block->pointer);
        memory.stats.num_device_free += 1;
        aggregate(memory.stats.segment).decrease(1);
        aggregate(memory.stats.reserved_bytes).decrease(capacity);
      }
      pool.clear();
    }
  }

  [[noreturn]] void throw_out_of_memory(c10::DeviceIndex device, size_t bytes) {
    using c10::CachingAllocator::format_size;
    auto& stats = of(device).stats;
    stats.num_ooms += 1;
    auto [free_bytes, total_bytes] = getMemoryInfo(device);
    TORCH_CHECK_WITH(OutOfMemoryError, false, describe_chip(device),
                     " is out of memory: tried to allocate ", format_size(bytes), ", ",
                     format_size(free_bytes), " free of its ", format_size(total_bytes), " (",
                     format_size(aggregate(stats.allocated_bytes).current), " held by tensors)");
  }

  template <typename Function>
  void for_each_stat(c10::DeviceIndex device, Function apply) {
    std::lock_guard lock(mutex_);
    auto& stats = of(device).stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                       &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      apply(aggregate(*stat));
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, BlockPtr> live_;
  std::unordered_map<c10::DeviceIndex, Memory> memories_;
};

ChipAllocator& allocator() {
  static auto* instance = new ChipAllocator();  // never destroyed: tensors may outlive statics
  return *instance;
}

void free_pointer(void* pointer) { allocator().free(pointer); }

thread_local c10::DeviceIndex host_tensors_on = -1;

c10::Allocator* host_allocator = nullptr;  // the CPU's, which HostAllocator stands in front of

// Stands in front of the CPU allocator and looks at one thread-local: see AllocateOnChip.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (host_tensors_on < 0) return host_allocator->allocate(bytes);
    auto pointer = allocator().allocate_on(host_tensors_on, bytes);
    pointer.unsafe_set_device(c10::Device(c10::DeviceType::CPU));
    return pointer;
  }

  // Raw memory may be taken inside an operator and returned outside it, or the other way round,
  // so it is told apart when it comes back.
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return host_allocator->is_simple_data_ptr(pointer);
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    host_allocator->copy_data(destination, source, count);
  }

 private:
  static void free_raw(void* pointer);
};

void HostAllocator::free_raw(void* pointer) {
  if (pointer && !allocator().free(pointer)) host_allocator->raw_deallocate(pointer);
}

}  // namespace

void register_allocator() {
  constexpr uint8_t kPriority = 1;
  c10::SetAllocator(kChip, &allocator(), kPriority);
  host_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new HostAllocator(), kPriority);
}

c10::Allocator* chip_allocator() { return &allocator(); }

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  return allocator().allocate_on(device, bytes);
}

bool owns_chip_memory(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_pointer;
}

AllocateOnChip::AllocateOnChip(c10::DeviceIndex device)
    : previous_(std::exchange(host_tensors_on, device)) {}

AllocateOnChip::~AllocateOnChip() { host_tensors_on = previous_; }

}  // namespace ditorch
