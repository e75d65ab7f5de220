#include "runtime/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/block.h"
#include "runtime/copy.h"
#include "runtime/memory_watch.h"
#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kGranularityBytes = 512;
constexpr size_t kMiB = size_t{1} << 20;

size_t round_up(size_t bytes, size_t unit_bytes) {
  if (bytes > SIZE_MAX - unit_bytes) return bytes;  // no chip has it; a sum would wrap
  return (bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
}

// Small tensors share segments of their own, so that one that lasts does not hold on to a segment
// that large ones need.
bool is_small(size_t bytes) { return bytes <= kMiB; }

Stat& aggregate(StatArray& stat) { return stat[static_cast<size_t>(StatType::AGGREGATE)]; }

void free_pointer(void* pointer);

class ChipAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }

  c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
    if (bytes == 0) return {nullptr, chip_device(device)};
    std::lock_guard lock(mutex_);
    auto* block = take(device, round_up(bytes, kGranularityBytes));
    live_.emplace(block->pointer, block);
    return {block->pointer, block->pointer, &free_pointer, chip_device(device)};
  }

  // False if the pointer is not this allocator's.
  bool free(void* pointer) {
    std::lock_guard lock(mutex_);
    auto found = live_.find(pointer);
    if (found == live_.end()) return false;
    auto* block = found->second;
    live_.erase(found);
    auto& memory = of(block->device);
    aggregate(memory.stats.allocation).decrease(1);
    aggregate(memory.stats.allocated_bytes).decrease(block->allocated_bytes);
    aggregate(memory.stats.requested_bytes).decrease(block->allocated_bytes);
    if (block->uses.freed()) {
      memory.waiting.push_back(block);
    } else {
      cache(memory, block);
    }
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
  struct Cache {
    FreeBlocks small, large;
  };

  struct Memory {
    size_t total_bytes = 0;  // the chip's
    std::map<c10::StreamId, Cache> cached;
    std::vector<Block*> waiting;  // freed, but another stream still reads or writes them
    DeviceStats stats;

    FreeBlocks& pool(c10::StreamId stream, size_t bytes) {
      auto& cache = cached[stream];
      return is_small(bytes) ? cache.small : cache.large;
    }

    // Free bytes beside tensors: the chip cannot have them back for a larger one. They are kept to
    // an eighth of the chip; beyond that each tensor has a segment to itself. On a chip of less
    // than 1 GiB, which is emulated, it always has, so that a plan fits to the byte.
    bool may_strand(size_t bytes) {
      if (total_bytes < 1024 * kMiB) return false;
      const auto stranded_bytes = aggregate(stats.inactive_split_bytes).current;
      return static_cast<size_t>(stranded_bytes) + bytes <= total_bytes / 8;
    }
  };

  // What a tensor is wanted for: where, and how large.
  struct Request {
    c10::DeviceIndex device;
    c10::StreamId stream;
    size_t bytes;
  };

  Memory& of(c10::DeviceIndex device) {
    auto& memory = memories_[device];
    if (memory.total_bytes == 0) memory.total_bytes = getMemoryInfo(device).second;
    return memory;
  }

  // A block of at least `bytes`: from the cache, else from the vendor, else from the vendor
  // again once everything cached has been given back.
  Block* take(c10::DeviceIndex device, size_t bytes) {
    auto& memory = of(device);
    const Request request{device, current_stream(device).id(), bytes};
    collect(memory, false);
    auto* block = take_cached(memory, request);
    if (!block) block = take_shared(memory, request);
    if (!block) block = take_fresh(memory, request, bytes);
    if (!block) {
      memory.stats.num_alloc_retries += 1;
      collect(memory, true);
      release_cache(memory);
      block = take_cached(memory, request);
      if (!block) block = take_fresh(memory, request, bytes);
    }
    if (!block) throw_out_of_memory(device, bytes);
    block->allocated_bytes = bytes;
    aggregate(memory.stats.allocation).increase(1);
    aggregate(memory.stats.active).increase(1);
    aggregate(memory.stats.allocated_bytes).increase(bytes);
    aggregate(memory.stats.requested_bytes).increase(bytes);
    aggregate(memory.stats.active_bytes).increase(block->bytes);
    return block;
  }

  // The smallest free block that is large enough, cut to size.
  Block* take_cached(Memory& memory, const Request& request) {
    auto& pool = memory.pool(request.stream, request.bytes);
    auto* block = pool.smallest(request.bytes, [&](const Block& candidate) {
      const size_t rest_bytes = candidate.bytes - request.bytes;
      return !candidate.is_segment() || rest_bytes <= request.bytes / 8 ||
             memory.may_strand(rest_bytes);
    });
    if (!block) return nullptr;
    remove_free(memory, block);
    return cut(memory, block, request.bytes);
  }

  // A piece of a new segment that is made for several tensors, as large as torch makes it on CUDA.
  Block* take_shared(Memory& memory, const Request& request) {
    const size_t bytes = request.bytes;
    const size_t segment_bytes =
        !is_small(bytes) && bytes < 10 * kMiB ? 20 * kMiB : round_up(bytes, 2 * kMiB);
    if (!memory.may_strand(segment_bytes - bytes)) return nullptr;
    auto* block = take_fresh(memory, request, segment_bytes);
    return block ? cut(memory, block, bytes) : nullptr;
  }

  // A new segment; null if the chip is full.
  Block* take_fresh(Memory& memory, const Request& request, size_t bytes) {
    void* pointer = nullptr;
    auto status = vendor().runtime->memory_allocate(request.device, bytes, &pointer);
    if (status == DITORCH_OUT_OF_MEMORY) return nullptr;
    check(status, "allocate memory");
    memory_taken(request.device, pointer, bytes);
    memory.stats.num_device_alloc += 1;
    aggregate(memory.stats.segment).increase(1);
    aggregate(memory.stats.reserved_bytes).increase(bytes);
    return new Block{static_cast<char*>(pointer), bytes, request.device, request.stream,
                     &memory.pool(request.stream, request.bytes)};
  }

  // Cuts off what `bytes` leave of the block, unless that is too little to be of use.
  Block* cut(Memory& memory, Block* block, size_t bytes) {
    const size_t rest_bytes = block->bytes - bytes;
    if (rest_bytes < (is_small(bytes) ? kGranularityBytes : kMiB)) return block;
    if (block->is_segment() && !memory.may_strand(rest_bytes)) return block;
    add_free(memory, block->split(bytes));
    return block;
  }

  // Joins a freed block to its free neighbours.
  void cache(Memory& memory, Block* block) {
    aggregate(memory.stats.active).decrease(1);
    aggregate(memory.stats.active_bytes).decrease(block->bytes);
    if (block->after && block->after->is_free) {
      remove_free(memory, block->after);
      block->merge_after();
    }
    if (block->before && block->before->is_free) {
      block = block->before;
      remove_free(memory, block);
      block->merge_after();
    }
    add_free(memory, block);
  }

  void add_free(Memory& memory, Block* block) {
    block->pool->add(block);
    if (block->is_segment()) return;
    aggregate(memory.stats.inactive_split).increase(1);
    aggregate(memory.stats.inactive_split_bytes).increase(block->bytes);
  }

  void remove_free(Memory& memory, Block* block) {
    block->pool->remove(block);
    if (block->is_segment()) return;
    aggregate(memory.stats.inactive_split).decrease(1);
    aggregate(memory.stats.inactive_split_bytes).decrease(block->bytes);
  }

  // Caches freed blocks whose other streams have finished.
  void collect(Memory& memory, bool wait) {
    if (memory.waiting.empty()) return;
    std::vector<Block*> still_waiting;
    for (auto* block : memory.waiting) {
      if (block->uses.finished(wait)) {
        cache(memory, block);
      } else {
        still_waiting.push_back(block);
      }
    }
    memory.waiting.swap(still_waiting);
  }

  void release_cache(Memory& memory) {
    for (auto& [stream, cache] : memory.cached) {
      for (auto* pool : {&cache.small, &cache.large}) {
        for (auto* segment : pool->remove_segments()) release(memory, segment);
      }
    }
  }

  void release(Memory& memory, Block* segment) {
    memory_returned(segment->pointer);
    vendor().runtime->memory_free(segment->device, segment->pointer);
    memory.stats.num_device_free += 1;
    aggregate(memory.stats.segment).decrease(1);
    aggregate(memory.stats.reserved_bytes).decrease(segment->bytes);
    delete segment;
  }

  [[noreturn]] void throw_out_of_memory(c10::DeviceIndex device, size_t bytes) {
    using c10::CachingAllocator::format_size;
    auto& stats = of(device).stats;
    stats.num_ooms += 1;
    auto [free_bytes, total_bytes] = getMemoryInfo(device);
    TORCH_CHECK_WITH(OutOfMemoryError, false, describe_chip(device),
                     " is out of memory: tried to allocate ", format_size(bytes), ", ",
                     format_size(free_bytes), " free of its ", format_size(total_bytes), " (",
                     format_size(aggregate(stats.allocated_bytes).current), " held by tensors, ",
                     format_size(aggregate(stats.inactive_split_bytes).current), " between them)");
  }

  template <typename Function>
  void for_each_stat(c10::DeviceIndex device, Function apply) {
    std::lock_guard lock(mutex_);
    auto& stats = of(device).stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split,
                       &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                       &stats.inactive_split_bytes, &stats.requested_bytes}) {
      apply(aggregate(*stat));
    }
  }

  std::mutex mutex_;
  ska::flat_hash_map<void*, Block*> live_;
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
