// scaled_dot_product_attention in one piece, where the chip has a kernel for it.
#pragma once

#include "ops/host_kernels.h"
#include "ops/vendor_kernels.h"

namespace ditorch::attention {

// Whether the chip at hand computes it, asked with a query and a key.
bool vendor_has();

VendorKernels all_kernels();

// torch's operators for devices other than its own have no kernel of the CPU's.
void host_forward(const c10::OperatorHandle& handle, torch::jit::Stack* stack);
void host_backward(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

}  // namespace ditorch::attention
