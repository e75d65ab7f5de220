// Tensors side by side in one: strided copies into its parts.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::concatenation {

VendorKernels all_kernels();

}  // namespace ditorch::concatenation
