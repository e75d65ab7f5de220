// The zero-copy bridge to the host's kernels: device tensors as CPU tensors over the same memory,
// and what the kernel returns as device tensors again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

namespace ditorch {

class HostArguments {
 public:
  explicit HostArguments(c10::DeviceIndex device) : device_(device) {}

  // A CPU tensor over the memory of `tensor`. One tensor, or one storage, always gives the same
  // alias, so that the kernel sees what overlaps. Tensors of other devices pass as they are.
  at::Tensor alias(const at::Tensor& tensor);

  // The argument in the host's terms: tensors, lists of them, and device arguments.
  c10::IValue alias(const c10::IValue& value);

  // Once the kernel is done: sizes, strides and memory that it gave to an argument (out= and
  // resize) reach the device tensor.
  void write_back();

  // A result in the device's terms: an argument itself, a true view of one, or fresh memory of the
  // chip taken over without a copy.
  at::Tensor restore(const at::Tensor& result);
  c10::IValue restore(const c10::IValue& value);

 private:
  struct Tensors {
    at::Tensor device;
    at::Tensor host;
  };
  struct Storages {
    c10::Storage device;
    c10::Storage host;
  };

  c10::Storage host_storage(const c10::Storage& device);
  c10::Storage device_storage(const c10::Storage& host);

  c10::DeviceIndex device_;
  c10::SmallVector<Tensors, 6> tensors_;
  c10::SmallVector<Storages, 6> storages_;
};

}  // namespace ditorch
