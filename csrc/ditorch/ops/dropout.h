// Dropout, whose random numbers the chip makes itself.
#pragma once

#include "ops/vendor_kernels.h"

namespace ditorch::dropout {

// Whether the chip's elementwise programs have random numbers.
bool vendor_has();

VendorKernels all_kernels();

// A key of random numbers, from a device's generator: its state, which programs keep and set, says
// all.
int64_t draw_key(c10::DeviceIndex device);

}  // namespace ditorch::dropout
