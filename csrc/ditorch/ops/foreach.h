// ATen's elementwise operators over lists of tensors, as programs of the operator ABI.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::foreach {

VendorKernels all_kernels();

}  // namespace ditorch::foreach
