// What torch.amp.GradScaler does with gradients and with its scale.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::loss_scale {

// They need the vendor's elementwise programs and its sum.
VendorKernels all_kernels();

}  // namespace ditorch::loss_scale
