// Strided copies into the parts of a tensor: cat, roll.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::concatenation {

VendorKernels all_kernels();

}  // namespace ditorch::concatenation
