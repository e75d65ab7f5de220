// Sums and means; norms, all and any, which are made of sums and of elementwise programs.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/formula.h"
#include "ops/vendor_kernels.h"

namespace ditorch::reductions {

VendorKernels all_kernels();

// Those that need the vendor's elementwise programs, too.
VendorKernels composed_kernels();

// out, of one element, = the sum of a contiguous tensor of the same dtype.
ditorch_status sum_all(const ditorch_context& context, const at::Tensor& input,
                       const at::Tensor& out);

// out, of one element, = the sum of a formula of a contiguous tensor's elements, taken in out's
// dtype. It is summed in parts, so that its values take little memory, however large the tensor is.
ditorch_status sum_of(const ditorch_context& context, const Formula& formula,
                      const at::Tensor& input, const at::Tensor& out);

}  // namespace ditorch::reductions
