// Operators on elements that an index names.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "ops/vendor_kernels.h"

namespace ditorch::indexed {

constexpr int64_t kNothing = INT64_MIN;  // what is skipped where no index is

// Whether the vendor's table has the entries; what a chip says of a call shows only then.
bool vendor_has();

// dense = what the index names along dimension `dim` of the table, and zero where the index is
// `skipped`. dense and index have one shape.
ditorch_status gather(const ditorch_context& context, const at::Tensor& dense,
                      const at::Tensor& index, const at::Tensor& table, int64_t dim,
                      int64_t skipped = kNothing);

// Adds dense to it.
ditorch_status scatter_add(const ditorch_context& context, const at::Tensor& dense,
                           const at::Tensor& index, const at::Tensor& table, int64_t dim,
                           int64_t skipped = kNothing);

// Puts dense in its place.
ditorch_status scatter(const ditorch_context& context, const at::Tensor& dense,
                       const at::Tensor& index, const at::Tensor& table, int64_t dim,
                       int64_t skipped = kNothing);

VendorKernels all_kernels();

// Those that need `scatter`, which came later.
VendorKernels scatter_kernels();

}  // namespace ditorch::indexed
