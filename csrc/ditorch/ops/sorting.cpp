#include "ops/sorting.h"

#include <ATen/core/Tensor.h>

#include "ops/charge.h"
#include "ops/map.h"
#include "ops/tensors.h"

namespace ditorch::sorting {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

// The first of each row in order, and the places they come from.
ditorch_status sort(const ditorch_context& context, const at::Tensor& self, int64_t dim,
                    bool descending, const at::Tensor& values, const at::Tensor& places,
                    Results& results) {
  if (!is_describable(self, values) || !is_last(self, dim) || values.dim() != self.dim() ||
      self.numel() == 0 || values.numel() == 0 || places.sizes() != values.sizes() ||
      !values.is_contiguous() || !places.is_contiguous() ||
      values.scalar_type() != self.scalar_type() || places.scalar_type() != c10::kLong ||
      values.is_alias_of(self) || places.is_alias_of(self)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto input = self.contiguous();
  const auto length = input.size(-1);
  const ditorch_sort call{sizeof(call),
                          abi_dtype(input.scalar_type()),
                          descending,
                          input.numel() / length,
                          length,
                          values.size(-1),
                          input.const_data_ptr(),
                          values.mutable_data_ptr(),
                          places.mutable_data_ptr<int64_t>()};
  results = {values, places};
  return vendor().operators->sort(&context, &call);
}

// sort.values_stable(self, stable, dim, descending, values, indices)
ditorch_status sort_out(const ditorch_context& context, Arguments arguments, Results& results) {
  return sort(context, arguments[0].toTensor(), arguments[2].toInt(), arguments[3].toBool(),
              arguments[4].toTensor(), arguments[5].toTensor(), results);
}

// topk.values(self, k, dim, largest, sorted, values, indices)
ditorch_status topk_out(const ditorch_context& context, Arguments arguments, Results& results) {
  return sort(context, arguments[0].toTensor(), arguments[2].toInt(), arguments[3].toBool(),
              arguments[5].toTensor(), arguments[6].toTensor(), results);
}

// cumsum.out(self, dim, dtype, out)
ditorch_status cumsum_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[3].toTensor();
  const auto dim = from_front(arguments[1].toInt(), self);
  if (!is_describable(self, out) || self.numel() == 0 || dim < 0 || dim >= self.dim() ||
      out.sizes() != self.sizes() || !out.is_contiguous() ||
      abi_dtype(out.scalar_type()) >= DITORCH_BOOL) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  if (!out.is_same(self)) {  // it is summed in place, in the dtype of the result
    const auto status = map_copy(context, out, self);
    if (status != DITORCH_OK) return status;
  }
  ditorch_scan call{sizeof(call),         abi_dtype(out.scalar_type()), 1, out.size(dim), 1,
                    out.const_data_ptr(), out.mutable_data_ptr()};
  for (int64_t before = 0; before < dim; ++before) call.outer *= out.size(before);
  call.inner = out.numel() / (call.outer * call.length);
  results = {out};
  return vendor().operators->scan(&context, &call);
}

}  // namespace

VendorKernels all_kernels() {
  VendorKernels found;
  if (vendor().operators->sort) {
    found.emplace("aten::sort.values_stable", sort_out);
    found.emplace("aten::topk.values", topk_out);
  }
  if (vendor().operators->scan) found.emplace("aten::cumsum.out", cumsum_out);
  return found;
}

}  // namespace ditorch::sorting
