// What an operator costs the chip, and the bracket around it that makes the chip pay.
//
// The charging rule (runtime.h; heteropp's cost model implements the same): one charge for every
// ATen operator that reaches the device and is launched there. Not launched, hence free: views,
// empty and its kin (memory only), resize_, set_, and other changes of metadata. Copies between
// host and chip are paid through the vendor's memory_copy instead.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "ops/operator.h"
#include "runtime/vendor.h"

namespace ditorch {

class Charge {
 public:
  // Begins the operator on the current stream of `device`.
  explicit Charge(c10::DeviceIndex device);

  // Adds the device tensors among `values` (also those in lists), each once.
  void add(c10::ArrayRef<c10::IValue> values);
  void add(const at::Tensor& tensor);

  // Counts the floating point operations of `op` on `arguments`; before the call, as the call
  // consumes them.
  void count_product(const Operator& op, c10::ArrayRef<c10::IValue> arguments);

  // Ends the operator: the chip is busy with it from now on.
  void pay(const char* name, bool on_host);

 private:
  c10::DeviceIndex device_;
  ditorch_stream* stream_;
  c10::SmallVector<at::Tensor, 8> tensors_;
  double product_flops_ = 0;
};

ditorch_dtype abi_dtype(c10::ScalarType type);

}  // namespace ditorch
