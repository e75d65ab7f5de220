// A piece of the chip's memory, and the free ones among them. The vendor gives segments; a segment
// is cut into blocks, which know their neighbours and are joined again once they are free.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <set>
#include <vector>

#include "runtime/stream_uses.h"

namespace ditorch {

class FreeBlocks;

struct Block {
  char* pointer;
  size_t bytes;
  c10::DeviceIndex device;
  c10::StreamId stream;  // the stream it was allocated for; it is reused only there
  FreeBlocks* pool;      // where it goes when it is free

  size_t allocated_bytes = 0;  // what the tensor holds of it, rounded up
  bool is_free = false;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  StreamUses uses;  // other streams that touch it

  bool is_segment() const { return !before && !after; }

  // Keeps the first `kept_bytes`; the rest becomes the block after it.
  Block* split(size_t kept_bytes);

  // Takes over the block after it, which ceases to be.
  void merge_after();
};

// Free blocks by size.
class FreeBlocks {
 public:
  void add(Block* block) {
    block->is_free = true;
    blocks_.insert(block);
  }

  void remove(Block* block) {
    block->is_free = false;
    blocks_.erase(block);
  }

  // The smallest block of at least `bytes` that `suits`; null if there is none. It stays free.
  template <typename Predicate>
  Block* smallest(size_t bytes, Predicate suits) const {
    for (auto found = blocks_.lower_bound(bytes); found != blocks_.end(); ++found) {
      if (suits(**found)) return *found;
    }
    return nullptr;
  }

  // Those that are whole segments leave the pool, and the caller owns them.
  std::vector<Block*> remove_segments();

 private:
  struct BySize {
    using is_transparent = void;
    bool operator()(const Block* a, const Block* b) const {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->pointer < b->pointer;
    }
    bool operator()(const Block* a, size_t bytes) const { return a->bytes < bytes; }
    bool operator()(size_t bytes, const Block* b) const { return bytes < b->bytes; }
  };

  std::set<Block*, BySize> blocks_;
};

}  // namespace ditorch
