// Counts of equal elements.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::histogram {

VendorKernels all_kernels();

}  // namespace ditorch::histogram
