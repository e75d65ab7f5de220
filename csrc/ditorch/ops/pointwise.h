// ATen's elementwise operators as programs of the operator ABI.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/formula.h"
#include "ops/vendor_kernels.h"

namespace ditorch::pointwise {

VendorKernels all_kernels();

// written = the formula of the arguments, which broadcast to it.
ditorch_status compute(const ditorch_context& context, const Formula& formula,
                       c10::ArrayRef<c10::IValue> arguments, const at::Tensor& written);

}  // namespace ditorch::pointwise
