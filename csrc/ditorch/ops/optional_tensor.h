// An operator's argument that may be None: an undefined tensor then.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace ditorch {

inline at::Tensor optional_tensor(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

}  // namespace ditorch
