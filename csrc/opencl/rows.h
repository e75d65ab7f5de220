// What the kernels share on the host's side.
#pragma once

#include <algorithm>

#include "program.h"
#include "stream.h"
#include "tensor.h"

namespace opencl {

// Items that share a row: none but one on a processor, whose vectors are wide.
inline size_t items_of_row(const Device& device) {
  return device.is_cpu ? 1 : std::min<size_t>(128, device.largest_group_items);
}

// Elements that an item walks over where they are independent of each other.
inline int64_t run_of_item(const Device& device) { return device.is_cpu ? 1024 : 1; }

inline std::string row_options(const Device& device, ditorch_dtype data) {
  return compute_options(device, data) + " -DDATA=" + name_of(device, data) +
         " -DITEMS=" + std::to_string(items_of_row(device));
}

// Whether the device has kernels for all of them; absent tensors are fine.
inline bool are_known(const Device& device, std::initializer_list<Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
    return !tensor || (tensor.is_contiguous() && !name_of(device, tensor.dtype).empty());
  });
}

inline size_t count_of(int64_t elements, int64_t of_each) {
  return static_cast<size_t>((elements + of_each - 1) / of_each);
}

// Gives `body` the value in the type that kernels for the dtype compute in.
template <class Body>
void with_scalar(ditorch_dtype dtype, double value, Body body) {
  if (dtype == DITORCH_FLOAT64) {
    body(cl_double{value});
  } else {
    body(static_cast<cl_float>(value));
  }
}

}  // namespace opencl
