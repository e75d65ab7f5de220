#include "ops/vendor_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string_view>

#include "ops/attention.h"
#include "ops/charge.h"
#include "ops/class_loss.h"
#include "ops/concatenation.h"
#include "ops/dropout.h"
#include "ops/foreach.h"
#include "ops/fused_adam.h"
#include "ops/grouped.h"
#include "ops/histogram.h"
#include "ops/host_arguments.h"
#include "ops/indexed.h"
#include "ops/loss_scale.h"
#include "ops/map.h"
#include "ops/optional_tensor.h"
#include "ops/pointwise.h"
#include "ops/reductions.h"
#include "ops/sorting.h"
#include "ops/strict.h"
#include "ops/tensors.h"

namespace ditorch {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

const at::Tensor& of_handle(const ditorch_tensor* tensor) {
  return *reinterpret_cast<const at::Tensor*>(tensor);
}

// --- products -------------------------------------------------------------------------------

// out = a @ b for matrices or batches of them.
ditorch_status product(const ditorch_context& context, const at::Tensor& a, const at::Tensor& b,
                       const at::Tensor& out) {
  auto kernel = vendor().operators->matmul;
  const auto dims = a.dim();
  if (dims < 2 || dims > 3 || b.dim() != dims || out.dim() != dims ||
      a.scalar_type() != b.scalar_type() || a.scalar_type() != out.scalar_type() ||
      a.size(-1) != b.size(-2) || out.size(-2) != a.size(-2) || out.size(-1) != b.size(-1) ||
      (dims == 3 && (a.size(0) != b.size(0) || out.size(0) != a.size(0))) ||
      !is_describable(a, out) || !is_describable(b, out)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  if (out.numel() == 0) return DITORCH_OK;
  if (a.numel() == 0 && vendor_has_map()) {  // sums of nothing
    return pointwise::compute(context, {0.0}, {}, out);
  }
  if (!kernel || !are_plain({a, b, out}) || out.is_alias_of(a) || out.is_alias_of(b)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  return kernel(&context, handle(out), handle(a), handle(b));
}

// mm.out(self, mat2, out), bmm.out(self, mat2, out)
ditorch_status matmul_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& out = arguments[2].toTensor();
  auto status = product(context, arguments[0].toTensor(), arguments[1].toTensor(), out);
  results = {out};
  return status;
}

// out = alpha * out + beta * self, the sum rounded once. A beta of 0 leaves self unread, as torch
// has it.
ditorch_status sum_on_chip(const ditorch_context& context, Arguments arguments, bool adds) {
  if (!vendor_has_map()) return DITORCH_NOT_IMPLEMENTED;
  Formula sum = {argument(5), option(4), DITORCH_MULTIPLY};
  if (adds) sum = sum + Formula{argument(0), option(3), DITORCH_MULTIPLY, DITORCH_ADD};
  return pointwise::compute(context, sum, arguments, arguments[5].toTensor());
}

void sum_on_host(const ditorch_context& context, Arguments arguments, bool adds) {
  HostArguments host(context.device);
  auto sum = host.lend(arguments[5].toTensor(), /*written=*/true);
  sum.mul_(arguments[4].toScalar());
  if (adds) {
    const auto self = host.lend(arguments[0].toTensor(), /*written=*/false);
    sum.add_(self, arguments[3].toScalar());
  }
  host.write_back();
}

// addmm.out(self, mat1, mat2, beta, alpha, out), baddbmm.out alike: the chip multiplies, and the
// sum is taken in place over the same memory. The host takes it for a chip without elementwise
// programs; strict mode hears of that as of an operator that the chip does not take.
ditorch_status matmul_add_out(const ditorch_context& context, Arguments arguments,
                              Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[5].toTensor();
  results = {out};
  if (out.numel() == 0) {  // no sums: product sees whether that is the result's shape
    return product(context, arguments[1].toTensor(), arguments[2].toTensor(), out);
  }
  if (!are_plain({self, out}) || self.scalar_type() != out.scalar_type() ||
      self.dim() > out.dim() || out.is_alias_of(self)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  auto status = product(context, arguments[1].toTensor(), arguments[2].toTensor(), out);
  if (status != DITORCH_OK) return status;
  const bool adds = !arguments[3].toScalar().equal(0);
  if (!adds && arguments[4].toScalar().equal(1)) return DITORCH_OK;
  status = sum_on_chip(context, arguments, adds);
  if (status != DITORCH_NOT_IMPLEMENTED || is_strict()) return status;
  sum_on_host(context, arguments, adds);
  return DITORCH_OK;
}

// --- softmax --------------------------------------------------------------------------------

using Forward = ditorch_status (*)(const ditorch_context*, ditorch_tensor*, const ditorch_tensor*);
using Backward = ditorch_status (*)(const ditorch_context*, ditorch_tensor*, const ditorch_tensor*,
                                    const ditorch_tensor*);

// _softmax.out(self, dim, half_to_float, out) and _log_softmax.out alike
template <Forward ditorch_operators::* entry>
ditorch_status softmax_out(const ditorch_context& context, Arguments arguments, Results& results) {
  auto kernel = vendor().operators->*entry;
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[3].toTensor();
  if (!kernel || !are_plain({self, out}) || !is_last(self, arguments[1].toInt()) ||
      arguments[2].toBool() || self.scalar_type() != out.scalar_type() ||
      self.sizes() != out.sizes() || !out.is_contiguous() || out.is_alias_of(self)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto input = self.contiguous();
  results = {out};
  return kernel(&context, handle(out), handle(input));
}

// _softmax_backward_data.out(grad_output, output, dim, input_dtype, out), log_softmax's alike
template <Backward ditorch_operators::* entry>
ditorch_status softmax_backward_out(const ditorch_context& context, Arguments arguments,
                                    Results& results) {
  auto kernel = vendor().operators->*entry;
  const auto& given = arguments[0].toTensor();
  const auto& output = arguments[1].toTensor();
  const auto& out = arguments[4].toTensor();
  if (!kernel || !are_plain({given, output, out}) || !is_last(output, arguments[2].toInt()) ||
      given.scalar_type() != output.scalar_type() || out.scalar_type() != output.scalar_type() ||
      given.sizes() != output.sizes() || out.sizes() != output.sizes() ||
      !are_contiguous({output, out}) || out.is_alias_of(given) || out.is_alias_of(output)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto grad_output = given.contiguous();
  results = {out};
  return kernel(&context, handle(out), handle(grad_output), handle(output));
}

// --- normalisation --------------------------------------------------------------------------

// An input seen as rows of the normalised dimensions; statistics have one element for each row.
struct Rows {
  int64_t length = 1;
  std::vector<int64_t> statistics;  // the input's sizes, with 1 for what is normalised

  Rows(const at::Tensor& input, size_t normalized_dims) : statistics(input.sizes().vec()) {
    for (auto i = statistics.size() - normalized_dims; i < statistics.size(); ++i) {
      length *= std::exchange(statistics[i], 1);
    }
  }
};

bool normalizes(const at::Tensor& input, c10::IntArrayRef shape) {
  return input.dim() >= static_cast<int64_t>(shape.size()) && !shape.empty() &&
         input.sizes().slice(input.dim() - shape.size()) == shape;
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> out, mean, rstd
ditorch_status layer_norm(const ditorch_context& context, Arguments arguments, Results& results) {
  auto kernel = vendor().operators->layer_norm;
  const auto& given = arguments[0].toTensor();
  const auto shape = arguments[1].toIntVector();
  const auto weight = optional_tensor(arguments[2]);
  const auto bias = optional_tensor(arguments[3]);
  if (!kernel || !are_plain({given, weight, bias}) || !are_contiguous({weight, bias}) ||
      !normalizes(given, shape)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto input = given.contiguous();
  const Rows rows(input, shape.size());
  // Statistics have the dtype the host's kernels expect: that of the parameters.
  const auto options = weight.defined() ? weight.options() : input.options();
  auto out = at::empty(input.sizes(), input.options());
  auto mean = at::empty(rows.statistics, options);
  auto rstd = at::empty(rows.statistics, options);
  auto status = kernel(&context, handle(out), handle(mean), handle(rstd), handle(input),
                       handle(weight), handle(bias), rows.length, arguments[4].toDouble());
  results = {out, mean, rstd};
  return status;
}

// native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask)
ditorch_status layer_norm_backward(const ditorch_context& context, Arguments arguments,
                                   Results& results) {
  auto kernel = vendor().operators->layer_norm_backward;
  const auto& given = arguments[1].toTensor();
  const auto shape = arguments[2].toIntVector();
  const auto mean = arguments[3].toTensor().contiguous();
  const auto rstd = arguments[4].toTensor().contiguous();
  const auto weight = optional_tensor(arguments[5]);
  const auto wanted = arguments[7].toBoolList();
  if (!kernel || !are_plain({arguments[0].toTensor(), given, mean, rstd, weight}) ||
      !are_contiguous({weight}) || !normalizes(given, shape)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto grad_output = arguments[0].toTensor().contiguous();
  const auto input = given.contiguous();
  const auto parameters = weight.defined() ? weight.options() : input.options();
  auto grad_input = at::empty(input.sizes(), input.options());
  at::Tensor grad_weight, grad_bias;
  if (wanted[1]) grad_weight = at::empty(shape, parameters);
  if (wanted[2]) grad_bias = at::empty(shape, parameters);
  auto status = kernel(&context, handle(grad_input), handle(grad_weight), handle(grad_bias),
                       handle(grad_output), handle(input), handle(mean), handle(rstd),
                       handle(weight), Rows(input, shape.size()).length);
  results = {wanted[0] ? grad_input : at::Tensor(), grad_weight, grad_bias};
  return status;
}

// torch's default epsilon: that of the dtype the host computes in.
double default_epsilon(const at::Tensor& input) {
  return wide_dtype(input) == c10::kDouble ? std::numeric_limits<double>::epsilon()
                                           : std::numeric_limits<float>::epsilon();
}

// _fused_rms_norm(input, normalized_shape, weight, eps) -> out, rstd
ditorch_status rms_norm(const ditorch_context& context, Arguments arguments, Results& results) {
  auto kernel = vendor().operators->rms_norm;
  const auto& given = arguments[0].toTensor();
  const auto shape = arguments[1].toIntVector();
  const auto weight = optional_tensor(arguments[2]);
  if (!kernel || !are_plain({given, weight}) || !are_contiguous({weight}) ||
      (weight.defined() && weight.scalar_type() != given.scalar_type()) ||
      !normalizes(given, shape)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto input = given.contiguous();
  const Rows rows(input, shape.size());
  const double eps = arguments[3].isNone() ? default_epsilon(input) : arguments[3].toDouble();
  auto out = at::empty(input.sizes(), input.options());
  auto rstd = at::empty(rows.statistics, input.options().dtype(wide_dtype(input)));
  auto status =
      kernel(&context, handle(out), handle(rstd), handle(input), handle(weight), rows.length, eps);
  results = {out, rstd};
  return status;
}

// _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, mask)
ditorch_status rms_norm_backward(const ditorch_context& context, Arguments arguments,
                                 Results& results) {
  auto kernel = vendor().operators->rms_norm_backward;
  const auto& given = arguments[1].toTensor();
  const auto shape = arguments[2].toIntVector();
  const auto rstd = arguments[3].toTensor().contiguous();
  const auto weight = optional_tensor(arguments[4]);
  const auto wanted = arguments[5].toBoolList();
  if (!kernel || !are_plain({arguments[0].toTensor(), given, rstd, weight}) ||
      !are_contiguous({weight}) || !normalizes(given, shape)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto grad_output = arguments[0].toTensor().contiguous();
  const auto input = given.contiguous();
  auto grad_input = at::empty(input.sizes(), input.options());
  // A kernel fills both gradients, whichever are wanted: a frozen weight has none.
  at::Tensor grad_weight;
  if (weight.defined()) grad_weight = at::empty(shape, weight.options());
  auto status =
      kernel(&context, handle(grad_input), handle(grad_weight), handle(grad_output), handle(input),
             handle(rstd), handle(weight), Rows(input, shape.size()).length);
  results = {wanted[0] ? grad_input : at::Tensor(), wanted[1] ? grad_weight : at::Tensor()};
  return status;
}

const ditorch_tensor_accessors kAccessors = {
    sizeof(ditorch_tensor_accessors),
    [](const ditorch_tensor* tensor) { return of_handle(tensor).mutable_data_ptr(); },
    [](const ditorch_tensor* tensor) { return abi_dtype(of_handle(tensor).scalar_type()); },
    [](const ditorch_tensor* tensor) { return static_cast<int32_t>(of_handle(tensor).dim()); },
    [](const ditorch_tensor* tensor) { return of_handle(tensor).sizes().data(); },
    [](const ditorch_tensor* tensor) { return of_handle(tensor).strides().data(); },
};

// Functional and in-place forms reach their .out form with memory already allocated, except for
// the normalisations, which have none.
const VendorKernels& entries_of_one_operator() {
  using Table = ditorch_operators;
  static const VendorKernels kernels = {
      {"aten::mm.out", matmul_out},
      {"aten::bmm.out", matmul_out},
      {"aten::addmm.out", matmul_add_out},
      {"aten::baddbmm.out", matmul_add_out},
      {"aten::_softmax.out", softmax_out<&Table::softmax>},
      {"aten::_log_softmax.out", softmax_out<&Table::log_softmax>},
      {"aten::_softmax_backward_data.out", softmax_backward_out<&Table::softmax_backward>},
      {"aten::_log_softmax_backward_data.out", softmax_backward_out<&Table::log_softmax_backward>},
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::_fused_rms_norm", rms_norm},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
  };
  return kernels;
}

const VendorKernels& vendor_kernels() {
  static const VendorKernels all = [] {
    VendorKernels found = entries_of_one_operator();
    found.merge(reductions::all_kernels());
    if (vendor_has_map()) {
      found.merge(pointwise::all_kernels());
      found.merge(foreach::all_kernels());
      found.merge(fused_adam::all_kernels());
      found.merge(reductions::composed_kernels());
      found.merge(concatenation::all_kernels());
      found.merge(loss_scale::all_kernels());
    }
    if (vendor_has_map() && indexed::vendor_has()) {
      found.merge(indexed::all_kernels());
      found.merge(indexed::scatter_kernels());
      found.merge(class_loss::all_kernels());
      found.merge(histogram::all_kernels());
    }
    if (vendor_has_map()) found.merge(sorting::all_kernels());
    if (grouped::vendor_has()) found.merge(grouped::all_kernels());
    if (attention::vendor_has()) found.merge(attention::all_kernels());
    if (dropout::vendor_has()) found.merge(dropout::all_kernels());
    return found;
  }();
  return all;
}

}  // namespace

VendorKernel find_vendor_kernel(const std::string& qualified_name, const std::string& overload) {
  if (!vendor().operators) return nullptr;
  auto found =
      vendor_kernels().find(overload.empty() ? qualified_name : qualified_name + "." + overload);
  return found == vendor_kernels().end() ? nullptr : found->second;
}

bool vendor_may_compute(std::string_view qualified_name) {
  if (qualified_name.ends_with('_')) qualified_name.remove_suffix(1);
  return vendor().operators &&
         std::any_of(vendor_kernels().begin(), vendor_kernels().end(), [&](const auto& kernel) {
           const std::string_view name = kernel.first;
           return name.substr(0, name.find('.')) == qualified_name;
         });
}

bool vendor_has_rms_norm() {
  if (!vendor().operators) return false;
  const auto input = at::empty({1, 8}, at::TensorOptions(chip_device(0)).dtype(c10::kFloat));
  const ditorch_context context{sizeof(context), 0, nullptr};
  const std::vector<c10::IValue> arguments = {input, std::vector<int64_t>{8}, c10::IValue(), 1e-5};
  Results results;
  return rms_norm(context, arguments, results) == DITORCH_OK;
}

void connect_vendor_kernels() {
  const auto* operators = vendor().operators;
  if (operators && operators->set_accessors) {
    check(operators->set_accessors(&kAccessors), "take the tensor accessors");
  }
}

}  // namespace ditorch
