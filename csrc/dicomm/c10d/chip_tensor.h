// A chip's tensor in a message that goes from chip to chip, past the host's memory.
#pragma once

#include <memory>

#include "chip_memory.h"
#include "core/chip_buffer.h"
#include "staging.h"
#include "streams.h"

namespace dicomm {

class ChipTensor final : public ChipBuffer {
 public:
  // Null where the tensor cannot go so: then it is staged on the host.
  static std::shared_ptr<ChipTensor> of(const at::Tensor& tensor, Access access);

  const std::shared_ptr<Staged>& staged() const { return tensor_; }
  const MemoryHandle& handle() const override { return handle_; }
  std::shared_ptr<ChipWork> pull(const MemoryHandle& from, std::size_t bytes) override;
  OnHost on_host() override;

  // Of a receive that is finished: behind the chip's copy, if it made one.
  const std::optional<StreamMark>& copied() const { return copied_; }

 private:
  ChipTensor(const at::Tensor& tensor, Access access, const ChipMemory& memory);

  const std::shared_ptr<Staged> tensor_;
  const ChipMemory& memory_;
  MemoryHandle handle_;  // to send
  StreamMark called_;    // to receive: what its stream was given before may still use the tensor
  std::optional<StreamMark> copied_;
};

}  // namespace dicomm
