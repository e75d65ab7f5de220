// scaled_dot_product_attention and FlashAttention in one piece, where the chip has a kernel for it.
#pragma once

#include <torch/library.h>

#include <string_view>

#include "ops/vendor_kernels.h"

namespace ditorch::attention {

// Whether the chip at hand computes it, asked with a query and a key while the vendor is loaded.
bool vendor_has();

// The same, as it was found then.
bool is_one_kernel();

// Whether its kernel also takes windows and documents that lie one after the other.
bool keeps_documents_apart();

VendorKernels all_kernels();

// The floating point operations of a call of one of the operators, by the charging rule.
double flops(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

// Gives the CPU kernels of the operators, which torch has for other devices alone.
void register_on_host(torch::Library& library);

}  // namespace ditorch::attention
