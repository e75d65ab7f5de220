#include "ops/sorting.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "ops/charge.h"
#include "ops/map.h"
#include "ops/tensors.h"

namespace ditorch::sorting {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

// The first of each row in order, and the places they come from.
ditorch_status sort(const ditorch_context& context, const at::Tensor& self, int64_t dim,
                    bool descending, const at::Tensor& values, const at::Tensor& places) {
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
  return vendor().operators->sort(&context, &call);
}

// sort.values_stable(self, stable, dim, descending, values, indices)
ditorch_status sort_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto &values = arguments[4].toTensor(), &places = arguments[5].toTensor();
  results = {values, places};
  return sort(context, arguments[0].toTensor(), arguments[2].toInt(), arguments[3].toBool(), values,
              places);
}

// topk.values(self, k, dim, largest, sorted, values, indices)
ditorch_status topk_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto &values = arguments[5].toTensor(), &places = arguments[6].toTensor();
  results = {values, places};
  return sort(context, arguments[0].toTensor(), arguments[2].toInt(), arguments[3].toBool(), values,
              places);
}

// --- the largest ------------------------------------------------------------------------------

// The dimensions of `dims`, all where there are none, as one that is the last; the others before it
// are one, too.
at::Tensor as_rows(const at::Tensor& self, const std::vector<int64_t>& dims) {
  if (self.dim() == 0) return self.reshape({1, 1});
  std::vector<bool> is_reduced(self.dim(), dims.empty());
  for (const auto dim : dims) is_reduced.at(from_front(dim, self)) = true;
  std::vector<int64_t> order;
  int64_t length = 1;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!is_reduced[dim]) order.push_back(dim);
  }
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!is_reduced[dim]) continue;
    order.push_back(dim);
    length *= self.size(dim);
  }
  return self.permute(order).reshape({-1, length});
}

// The largest of each row and its place: the first of a descending order, in which NaN leads.
// Memory for one that is not asked for is undefined.
ditorch_status largest(const ditorch_context& context, const at::Tensor& self,
                       const std::vector<int64_t>& dims, at::Tensor values, at::Tensor places) {
  const auto& asked = values.defined() ? values : places;
  if (!is_describable(self, asked) || self.numel() == 0 || !asked.is_contiguous()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  if (!values.defined()) values = at::empty(places.sizes(), self.options());
  if (!places.defined()) places = at::empty(values.sizes(), self.options().dtype(c10::kLong));
  if (!places.is_contiguous()) return DITORCH_NOT_IMPLEMENTED;
  const auto rows = as_rows(self, dims);
  if (rows.size(0) != values.numel()) return DITORCH_NOT_IMPLEMENTED;
  return sort(context, rows, -1, /*descending=*/true, values.view({-1, 1}), places.view({-1, 1}));
}

// amax.out(self, dims, keepdim, out)
ditorch_status amax_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& out = arguments[3].toTensor();
  results = {out};
  return largest(context, arguments[0].toTensor(), arguments[1].toIntVector(), out, {});
}

// max.dim_max(self, dim, keepdim, values, places)
ditorch_status max_of_dim(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto &values = arguments[3].toTensor(), &places = arguments[4].toTensor();
  results = {values, places};
  return largest(context, arguments[0].toTensor(), {arguments[1].toInt()}, values, places);
}

// argmax.out(self, dim, keepdim, out)
ditorch_status argmax_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& out = arguments[3].toTensor();
  results = {out};
  std::vector<int64_t> dims;
  if (!arguments[1].isNone()) dims.push_back(arguments[1].toInt());
  return largest(context, arguments[0].toTensor(), dims, {}, out);
}

// max(self)
ditorch_status max_of_all(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto out = at::empty({}, self.options());
  results = {out};
  return largest(context, self, {}, out, {});
}

// --- running sums -----------------------------------------------------------------------------

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
    found.emplace("aten::amax.out", amax_out);
    found.emplace("aten::max.dim_max", max_of_dim);
    found.emplace("aten::argmax.out", argmax_out);
    found.emplace("aten::max", max_of_all);
  }
  if (vendor().operators->scan) found.emplace("aten::cumsum.out", cumsum_out);
  return found;
}

}  // namespace ditorch::sorting
