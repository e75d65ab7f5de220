// Operators that put elements in order, or sum them one after the other.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::sorting {

VendorKernels all_kernels();

}  // namespace ditorch::sorting
