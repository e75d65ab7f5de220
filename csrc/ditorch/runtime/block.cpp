#include "runtime/block.h"

#include <memory>

namespace ditorch {

Block* Block::split(size_t kept_bytes) {
  auto* rest = new Block{pointer + kept_bytes, bytes - kept_bytes, device, stream, pool};
  rest->before = this;
  rest->after = after;
  if (after) after->before = rest;
  after = rest;
  bytes = kept_bytes;
  return rest;
}

void Block::merge_after() {
  const std::unique_ptr<Block> merged(after);
  bytes += merged->bytes;
  after = merged->after;
  if (after) after->before = this;
}

std::vector<Block*> FreeBlocks::remove_segments() {
  std::vector<Block*> segments;
  for (auto* block : blocks_) {
    if (block->is_segment()) segments.push_back(block);
  }
  for (auto* segment : segments) remove(segment);
  return segments;
}

}  // namespace ditorch
