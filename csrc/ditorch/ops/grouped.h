// Products of groups of rows, as experts have them.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::grouped {

// Whether the vendor's table has the entry; what a chip says of a call shows only then.
bool vendor_has();

VendorKernels all_kernels();

}  // namespace ditorch::grouped
