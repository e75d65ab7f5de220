// A step of torch's fused Adam and AdamW, whose lists one program of the chip walks.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::fused_adam {

VendorKernels all_kernels();

}  // namespace ditorch::fused_adam
