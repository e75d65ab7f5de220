#include "host_memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <deque>
#include <memory>
#include <mutex>

namespace dicomm {

namespace {

struct HostBlock {
  c10::DeviceType device;
  std::size_t bytes;
  c10::DataPtr memory;
  StreamMark used_until;
};

// Memory that no tensor uses now, the oldest first.
class IdleBlocks {
 public:
  HostBlock take(c10::DeviceType device, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
      if (block->device != device || block->bytes < bytes || block->bytes / 2 > bytes) continue;
      if (!block->used_until.is_surely_reached()) continue;
      HostBlock taken = std::move(*block);
      blocks_.erase(std::next(block).base());
      bytes_ -= taken.bytes;
      return taken;
    }
    return {device, bytes, c10::DataPtr(), {}};
  }

  void give(HostBlock block) {
    std::lock_guard lock(mutex_);
    bytes_ += block.bytes;
    blocks_.push_back(std::move(block));
    while (bytes_ > kMostBytes && blocks_.front().used_until.is_surely_reached()) {
      bytes_ -= blocks_.front().bytes;
      blocks_.pop_front();
    }
  }

 private:
  static constexpr std::size_t kMostBytes = 512 << 20;
  std::mutex mutex_;
  std::deque<HostBlock> blocks_;
  std::size_t bytes_ = 0;
};

IdleBlocks& idle_blocks() {
  static auto* blocks = new IdleBlocks();  // never destroyed: tensors may outlive every static
  return *blocks;
}

c10::DataPtr allocate(c10::DeviceType device, std::size_t bytes) {
  c10::Allocator* allocator = nullptr;
  try {
    allocator = at::getHostAllocator(device);
  } catch (const c10::Error&) {  // a device without pinned memory
  }
  return (allocator ? allocator : c10::GetCPUAllocator())->allocate(bytes);
}

void give_back(void* context) {
  const std::unique_ptr<HostBlock> block(static_cast<HostBlock*>(context));
  idle_blocks().give(std::move(*block));
}

}  // namespace

at::Tensor host_tensor_like(const at::Tensor& tensor) {
  HostBlock block = idle_blocks().take(tensor.device().type(), tensor.nbytes());
  if (!block.memory) block.memory = allocate(block.device, block.bytes);
  void* data = block.memory.get();
  auto* const kept = new HostBlock(std::move(block));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(),
                       c10::DataPtr(data, kept, &give_back, c10::kCPU));
  at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
  return host;
}

void keep_host_memory_until(const at::Tensor& tensor, StreamMark mark) {
  auto* const block = tensor.storage().data_ptr().cast_context<HostBlock>(&give_back);
  if (block) block->used_until = std::move(mark);
}

}  // namespace dicomm
