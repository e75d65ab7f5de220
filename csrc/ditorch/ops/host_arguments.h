// The bridge to the host's kernels: device tensors as CPU tensors, and what the kernel returns as
// device tensors again.
//
// Where the host reaches the chip's memory, the CPU tensors lie over the same memory and nothing is
// copied. Elsewhere each storage is staged: copied to the host before the kernel, and what the
// kernel wrote to is copied back after it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "runtime/allocator.h"

namespace ditorch {

// What the kernel looks at: a view needs the shapes of its argument, not its elements.
enum class Needs { elements, shapes };

class HostArguments {
 public:
  explicit HostArguments(c10::DeviceIndex device, Needs needs = Needs::elements);

  // The tensor in the host's terms. One tensor, or one storage, always gives the same CPU tensor or
  // storage, so that the kernel sees what overlaps. Tensors of other devices pass as they are.
  at::Tensor lend(const at::Tensor& tensor, bool written);

  // The argument in the host's terms: tensors, lists of them, and device arguments.
  c10::IValue lend(const c10::IValue& value, bool written);

  // While it lives, results of the host's kernels are made in the chip's memory if the host can
  // write there.
  std::optional<AllocateOnChip> results_on_chip() const;

  // Once the kernel is done: elements, sizes, strides and memory that it gave to an argument (out=
  // and resize) reach the device tensor.
  void write_back();

  // A result in the device's terms: an argument itself, a true view of one, or fresh memory of the
  // chip, which takes over what results_on_chip made without a copy.
  at::Tensor restore(const at::Tensor& result);
  c10::IValue restore(const c10::IValue& value);

 private:
  struct Tensors {
    at::Tensor device;
    at::Tensor host;
    bool written;
  };
  struct Storages {
    c10::Storage device;
    c10::Storage host;
  };
  struct Bytes {
    size_t first, last;
  };

  void part_from_clones(const c10::Storage& device);
  c10::Storage host_storage(const c10::Storage& device);
  c10::Storage device_storage(const c10::Storage& host);
  void write_back_aliased(Storages& storages);
  void write_back_staged(Storages& storages);
  Bytes written_to(const c10::Storage& host) const;

  c10::DeviceIndex device_;
  bool staged_;
  c10::SmallVector<Tensors, 6> tensors_;
  c10::SmallVector<Storages, 6> storages_;
};

}  // namespace ditorch
