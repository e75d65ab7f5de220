// scaled_dot_product_attention and FlashAttention in one piece, where the chip has a kernel for it.
#pragma once

#include <torch/library.h>

#include <string_view>

#include "ops/vendor_kernels.h"

namespace ditorch::attention {

// What attention may have beside whole sequences.
struct Extras {
  bool apart = false;  // windows, and documents that lie one after the other
  bool soft_cap = false;
  bool dropout = false;
};

// Whether the chip at hand computes it, as its kernel said when the vendor was loaded.
bool vendor_has(Extras extras = {});

VendorKernels all_kernels();

// The floating point operations of a call of one of the operators, by the charging rule.
double flops(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

// Gives the CPU kernels of the operators: ATen's, which torch has for other devices alone, and
// ours.
void register_on_host(torch::Library& aten, torch::Library& ours);

}  // namespace ditorch::attention
