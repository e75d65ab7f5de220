// ATen's elementwise operators as programs of the operator ABI.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::pointwise {

VendorKernels all_kernels();

}  // namespace ditorch::pointwise
