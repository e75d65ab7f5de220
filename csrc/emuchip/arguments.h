// Checks that kernels share: what the chip leaves to the host, and what makes no sense.
#pragma once

#include <initializer_list>

#include "error.h"
#include "tensor.h"

namespace emuchip {

struct Argument {
  const char* name;
  Tensor tensor;
  int64_t elements;  // expected
};

// DITORCH_OK if a row kernel can take these; absent tensors are fine.
inline ditorch_status check_rows(const char* operation, std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    const Tensor& tensor = argument.tensor;
    if (!tensor) continue;
    if (!tensor.floating() || !tensor.contiguous()) return DITORCH_NOT_IMPLEMENTED;
    if (tensor.elements() != argument.elements) {
      return fail(DITORCH_INVALID, "%s: %s has %lld elements, expected %lld", operation,
                  argument.name, static_cast<long long>(tensor.elements()),
                  static_cast<long long>(argument.elements));
    }
  }
  return DITORCH_OK;
}

// The number of rows, or -1 if `length` does not divide the tensor.
inline int64_t count_rows(const Tensor& tensor, int64_t length) {
  if (length <= 0) return tensor.elements() == 0 ? 0 : -1;
  return tensor.elements() % length == 0 ? tensor.elements() / length : -1;
}

}  // namespace emuchip
