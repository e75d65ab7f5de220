// Negative log-likelihood of classes, made of gathered elements, sums and elementwise programs.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::class_loss {

VendorKernels all_kernels();

}  // namespace ditorch::class_loss
