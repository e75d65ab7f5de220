// scaled_dot_product_attention in one piece, where the chip has a kernel for it.
#pragma once

#include <torch/library.h>

#include "ops/vendor_kernels.h"

namespace ditorch::attention {

// Whether the chip at hand computes it, asked with a query and a key while the vendor is loaded.
bool vendor_has();

// The same, as it was found then.
bool is_one_kernel();

VendorKernels all_kernels();

// Gives the CPU kernels of the two operators, which torch has for other devices alone.
void register_on_host(torch::Library& library);

}  // namespace ditorch::attention
