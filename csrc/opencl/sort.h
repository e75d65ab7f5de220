// Rows put in order, for the operator and for what sorts on its way.
#pragma once

#include "stream.h"
#include "tensor.h"

namespace opencl {

// Rows side by side, of which the first `kept` elements in order are wanted.
struct Rows {
  const void* data;
  ditorch_dtype dtype;  // one that element_of knows
  int64_t count, length, kept;
  bool descending;
};

// Memory that order_of works in.
size_t bytes_of_order(const Rows& rows);

// The places of each row in order, `length` cl_uint apart: a part of `memory`.
const cl_uint* order_of(Submission& submission, const Rows& rows, void* memory);

}  // namespace opencl
