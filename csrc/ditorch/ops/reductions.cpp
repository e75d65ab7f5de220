#include "ops/reductions.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "ops/formula.h"
#include "ops/map.h"
#include "ops/pointwise.h"
#include "ops/tensors.h"

namespace ditorch::reductions {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

struct Reduction {
  int64_t outer = 1, reduced = 1, inner = 1;
};

// For each dimension, whether it is reduced: all are where none is named.
std::vector<bool> reduced(const at::Tensor& input, const c10::IValue& dims) {
  if (!dims.isIntList() || dims.toIntVector().empty()) return std::vector<bool>(input.dim(), true);
  std::vector<bool> is_reduced(input.dim(), false);
  for (auto dim : dims.toIntVector()) is_reduced.at(from_front(dim, input)) = true;
  return is_reduced;
}

// The reduced dimensions as one run of a contiguous tensor; nothing if they are not adjacent.
std::optional<Reduction> adjacent(const at::Tensor& input, const c10::IValue& dims) {
  const auto is_reduced = reduced(input, dims);
  Reduction result;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    if (is_reduced[dim] && result.inner != 1) return std::nullopt;
    if (is_reduced[dim]) {
      result.reduced *= input.size(dim);
    } else if (result.reduced == 1) {
      result.outer *= input.size(dim);
    } else {
      result.inner *= input.size(dim);
    }
  }
  return result;
}

// Whether `out` has the sizes of `input` reduced over the dimensions. Torch may hand over memory
// that it has yet to give its sizes.
bool has_reduced_sizes(const at::Tensor& out, const at::Tensor& input, const c10::IValue& dims,
                       bool keeps) {
  const auto is_reduced = reduced(input, dims);
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    if (!is_reduced[dim]) sizes.push_back(input.size(dim));
    if (is_reduced[dim] && keeps) sizes.push_back(1);
  }
  return out.sizes() == sizes;
}

using Reduce = ditorch_status (*)(const ditorch_context*, ditorch_tensor*, const ditorch_tensor*,
                                  int64_t, int64_t, int64_t);

// sum.IntList_out(self, dim, keepdim, dtype, out) and mean.out alike
template <Reduce ditorch_operators::* entry>
ditorch_status reduce_out(const ditorch_context& context, Arguments arguments, Results& results) {
  auto kernel = vendor().operators->*entry;
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[4].toTensor();
  if (self.dim() == 0 || !has_reduced_sizes(out, self, arguments[1], arguments[2].toBool())) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  if (entry == &ditorch_operators::sum && self.numel() == 0 && vendor_has_map()) {
    results = {out};
    return pointwise::compute(context, {0.0}, {}, out);
  }
  if (!kernel || !are_plain({self, out}) || self.scalar_type() != out.scalar_type() ||
      !are_contiguous({out}) || out.is_alias_of(self)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto shape = adjacent(self, arguments[1]);
  if (!shape || out.numel() != shape->outer * shape->inner) return DITORCH_NOT_IMPLEMENTED;
  const auto input = self.contiguous();
  results = {out};
  return kernel(&context, handle(out), handle(input), shape->outer, shape->reduced, shape->inner);
}

// --- norms ------------------------------------------------------------------------------------

// out = sqrt(sum(input^2)) over dimensions that lie side by side.
ditorch_status euclidean_norm(const ditorch_context& context, const at::Tensor& input,
                              const c10::IValue& dims, const at::Tensor& out) {
  if (!are_plain({input, out})) return DITORCH_NOT_IMPLEMENTED;
  const auto shape = adjacent(input, dims);
  if (!shape || out.numel() != shape->outer * shape->inner) return DITORCH_NOT_IMPLEMENTED;
  const auto options = input.options().dtype(wide_dtype(input));
  const auto squares = at::empty(input.sizes(), options);
  const auto sums = at::empty(out.sizes(), options);
  const Step x = argument(0);
  auto status = pointwise::compute(context, {x, x, DITORCH_MULTIPLY}, {input}, squares);
  if (status == DITORCH_OK) {
    status = vendor().operators->sum(&context, handle(sums), handle(squares), shape->outer,
                                     shape->reduced, shape->inner);
  }
  if (status != DITORCH_OK) return status;
  return pointwise::compute(context, {x, DITORCH_SQRT}, {sums}, out);
}

// The norm of a whole tensor.
ditorch_status whole_norm(const ditorch_context& context, const at::Tensor& input,
                          const at::Tensor& out) {
  if (!are_plain({input, out}) || !input.is_contiguous()) {
    return euclidean_norm(context, input, c10::IValue(), out);
  }
  const auto total = at::empty({}, input.options().dtype(wide_dtype(input)));
  const Step x = argument(0);
  const auto status = sum_of(context, {x, x, DITORCH_MULTIPLY}, input, total);
  if (status != DITORCH_OK) return status;
  return pointwise::compute(context, {x, DITORCH_SQRT}, {total}, out);
}

bool is_euclidean(const c10::IValue& order) {
  return order.isScalar() && !order.toScalar().isComplex() && order.toScalar().toDouble() == 2;
}

// linalg_vector_norm.out(self, ord, dim, keepdim, dtype, out)
ditorch_status vector_norm_out(const ditorch_context& context, Arguments arguments,
                               Results& results) {
  const auto& out = arguments[5].toTensor();
  // A dtype that is given is also the one to square in.
  if (!is_euclidean(arguments[1]) || !arguments[4].isNone()) return DITORCH_NOT_IMPLEMENTED;
  results = {out};
  if (out.numel() == 1) return whole_norm(context, arguments[0].toTensor(), out);
  return euclidean_norm(context, arguments[0].toTensor(), arguments[2], out);
}

// _foreach_norm.Scalar(self, ord, dtype)
ditorch_status foreach_norm(const ditorch_context& context, Arguments arguments, Results& results) {
  if (!is_euclidean(arguments[1]) || !arguments[2].isNone()) return DITORCH_NOT_IMPLEMENTED;
  c10::List<at::Tensor> norms;
  for (const at::Tensor& tensor : arguments[0].toTensorList()) {
    const auto norm = at::empty({}, tensor.options());
    const auto status = whole_norm(context, tensor, norm);
    if (status != DITORCH_OK) return status;
    norms.push_back(norm);
  }
  results = {norms};
  return DITORCH_OK;
}

// --- truth ------------------------------------------------------------------------------------

// out = whether none of the elements over the dimensions is zero, or whether one is not: found by
// counting those that are, or are not.
ditorch_status all_or_any(const ditorch_context& context, const at::Tensor& input,
                          const c10::IValue& dims, bool all, const at::Tensor& out) {
  const auto shape = adjacent(input, dims);
  if (!shape || input.numel() == 0 || out.scalar_type() != c10::kBool ||
      out.numel() != shape->outer * shape->inner) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto options = input.options().dtype(c10::kFloat);
  const auto counted = at::empty(input.sizes(), options);
  const auto counts = at::empty(out.sizes(), options);
  const Step x = argument(0);
  const Formula is_zero = {x, 0.0, DITORCH_EQUAL};
  const Formula test = all ? is_zero : is_zero + Formula{DITORCH_NOT};  // of elements and of counts
  auto status = pointwise::compute(context, test, {input}, counted);
  if (status == DITORCH_OK) {
    status = vendor().operators->sum(&context, handle(counts), handle(counted), shape->outer,
                                     shape->reduced, shape->inner);
  }
  if (status != DITORCH_OK) return status;
  return pointwise::compute(context, test, {counts}, out);
}

// all.out(self, dim, keepdim, out), any.out alike
template <bool all>
ditorch_status truth_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& out = arguments[3].toTensor();
  results = {out};
  const auto& self = arguments[0].toTensor();
  // torch takes the dimensions 0 and -1 of a 0-dimensional tensor, which has none.
  const auto dims =
      self.dim() == 0 ? c10::IValue() : c10::IValue(std::vector<int64_t>{arguments[1].toInt()});
  return all_or_any(context, self, dims, all, out);
}

// all.all_out(self, out), any.all_out alike
template <bool all>
ditorch_status truth_of_all_out(const ditorch_context& context, Arguments arguments,
                                Results& results) {
  const auto& out = arguments[1].toTensor();
  results = {out};
  return all_or_any(context, arguments[0].toTensor(), c10::IValue(), all, out);
}

}  // namespace

ditorch_status sum_all(const ditorch_context& context, const at::Tensor& input,
                       const at::Tensor& out) {
  if (!vendor().operators->sum) return DITORCH_NOT_IMPLEMENTED;
  return vendor().operators->sum(&context, handle(out), handle(input), 1, input.numel(), 1);
}

ditorch_status sum_of(const ditorch_context& context, const Formula& formula,
                      const at::Tensor& input, const at::Tensor& out) {
  constexpr int64_t kFewestElements = 4096, kMostParts = 64;
  const auto flat = input.view({-1});
  const auto elements = flat.numel();
  const auto of_part = std::max(kFewestElements, (elements + kMostParts - 1) / kMostParts);
  const auto parts = (elements + of_part - 1) / of_part;
  const auto values = at::empty({std::min(of_part, elements)}, out.options());
  const auto sums = at::empty({parts}, out.options());
  for (int64_t part = 0; part < parts; ++part) {
    const auto first = part * of_part, count = std::min(of_part, elements - first);
    const auto here = values.narrow(0, 0, count);
    auto status = pointwise::compute(context, formula, {flat.narrow(0, first, count)}, here);
    if (status == DITORCH_OK) status = sum_all(context, here, sums.narrow(0, part, 1));
    if (status != DITORCH_OK) return status;
  }
  return sum_all(context, sums, out);
}

VendorKernels all_kernels() {
  using Table = ditorch_operators;
  return {
      {"aten::sum.IntList_out", reduce_out<&Table::sum>},
      {"aten::mean.out", reduce_out<&Table::mean>},
  };
}

VendorKernels composed_kernels() {
  if (!vendor().operators->sum) return {};
  return {
      {"aten::linalg_vector_norm.out", vector_norm_out},
      {"aten::_foreach_norm.Scalar", foreach_norm},
      {"aten::all.out", truth_out<true>},
      {"aten::all.all_out", truth_of_all_out<true>},
      {"aten::any.out", truth_out<false>},
      {"aten::any.all_out", truth_of_all_out<false>},
  };
}

}  // namespace ditorch::reductions
