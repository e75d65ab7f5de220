// Dropout, whose random numbers the chip makes itself.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::dropout {

// Whether the chip's elementwise programs have random numbers.
bool vendor_has();

VendorKernels all_kernels();

}  // namespace ditorch::dropout
