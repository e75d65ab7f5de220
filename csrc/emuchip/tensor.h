// A tensor as the kernels see it: where it is and how it is laid out.
#pragma once

#include <cstdint>

#include "chip_file.h"
#include "operators.h"

namespace emuchip {

struct Tensor {
  char* data = nullptr;
  ditorch_dtype dtype = DITORCH_OTHER;
  int32_t dimensions = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // in elements

  explicit operator bool() const { return sizes != nullptr; }  // false: an absent argument
  int64_t elements() const;
  bool contiguous() const;
  bool floating() const;  // of a dtype the kernels compute in
};

void set_tensor_accessors(const ditorch_tensor_accessors& accessors);

// NULL gives an absent tensor.
Tensor read_tensor(const ditorch_tensor* handle);

// How the chip computes, or NULL where the host's kernels should do it: a neutral chip.
const Numerics* own_numerics();

}  // namespace emuchip
