#include "ops/host_kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <map>
#include <vector>

#include "ops/batch_norm.h"
#include "ops/recurrent.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

void call_same(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "the device ", vendor().devices.front().library, " has no ",
                              c10::toString(handle.operator_name()),
                              ", as neither its vendor nor the CPU, which would compute it in the "
                              "chip's stead, has a kernel; compose it from other operators");
  handle.callBoxed(stack);
}

void call(const char* name, torch::jit::Stack* stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  call("aten::convolution", stack);
}

// The CPU's operator also wants the bias's sizes: one element for each output channel.
void convolution_backward(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  constexpr ptrdiff_t kAfterWeight = 3;
  auto arguments = stack->end() - static_cast<ptrdiff_t>(handle.schema().arguments().size());
  std::vector<int64_t> bias_sizes{arguments->toTensor().size(1)};
  stack->insert(arguments + kAfterWeight, bias_sizes);
  call("aten::convolution_backward", stack);
}

// The CPU has no fused backward. These are the steps its autograd takes through the composed
// forward, x * rsqrt(mean(x^2) + eps) * weight, so the result is the same bit for bit.
void compose_rms_norm_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto arguments = torch::jit::pop(*stack, 6);
  const auto& input_as_given = arguments[1].toTensor();
  const auto normalized = static_cast<int64_t>(arguments[2].toIntVector().size());
  const auto& rstd = arguments[3].toTensor();
  const auto weight = arguments[4].isTensor() ? arguments[4].toTensor() : at::Tensor();
  const auto wanted = arguments[5].toBoolList();

  const auto input = input_as_given.to(rstd.scalar_type());
  const auto grad_output = arguments[0].toTensor().to(rstd.scalar_type());
  std::vector<int64_t> leading, inner;
  int64_t count = 1;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    const bool is_inner = dim >= input.dim() - normalized;
    (is_inner ? inner : leading).push_back(dim);
    if (is_inner) count *= input.size(dim);
  }

  at::Tensor grad_input, grad_weight;
  if (wanted[1] && weight.defined()) {
    grad_weight = grad_output * (input * rstd);
    if (!leading.empty()) grad_weight = grad_weight.sum(leading, /*keepdim=*/true);
    grad_weight = grad_weight.view(weight.sizes()).to(weight.scalar_type());
  }
  if (wanted[0]) {
    const auto grad = weight.defined() ? grad_output * weight : grad_output;
    const auto grad_rstd = (grad * input).sum(inner, /*keepdim=*/true);
    const auto grad_mean = grad_rstd * -0.5 * rstd.pow(3);
    const auto grad_square = grad_mean.expand(input.sizes()) / count;
    grad_input = (grad * rstd + grad_square * (input * 2)).to(input_as_given.scalar_type());
  }
  torch::jit::push(*stack, grad_input, grad_weight);
}

// The CPU counts floating-point numbers only; float64 holds the others.
void histc(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto count = handle.schema().arguments().size();
  auto& input = *(stack->end() - static_cast<ptrdiff_t>(count));
  const auto type = input.toTensor().scalar_type();
  if (!at::isIntegralType(type, /*includeBool=*/false)) return call_same(handle, stack);
  const auto arguments = torch::jit::pop(*stack, count);
  const auto counts =
      arguments[0]
          .toTensor()
          .to(at::kDouble)
          .histc(arguments[1].toInt(), arguments[2].toScalar(), arguments[3].toScalar());
  const auto result = counts.to(at::kLong).to(type);
  if (count <= 4) return torch::jit::push(*stack, result);
  const auto& out = arguments[4].toTensor();
  out.resize_(result.sizes());
  out.copy_(result);
  torch::jit::push(*stack, out);
}

// Of a tensor of truth values, the CPU has neither: the first is the tensor itself.
void abs(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto count = static_cast<ptrdiff_t>(handle.schema().arguments().size());
  const auto& input = (stack->end() - count)->toTensor();
  if (count != 2 || input.scalar_type() != at::kBool) return call_same(handle, stack);
  const auto arguments = torch::jit::pop(*stack, 2);
  const auto& out = arguments[1].toTensor();
  out.resize_(arguments[0].toTensor().sizes());
  out.copy_(arguments[0].toTensor());
  torch::jit::push(*stack, out);
}

void trace(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& input = stack->back().toTensor();
  if (input.scalar_type() != at::kBool || input.dim() != 2) return call_same(handle, stack);
  torch::jit::push(*stack, torch::jit::pop(*stack).toTensor().diagonal().sum());
}

// The CPU refuses complex numbers.
void nansum(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto count = handle.schema().arguments().size();
  auto& input = *(stack->end() - static_cast<ptrdiff_t>(count));
  if (!input.toTensor().is_complex()) return call_same(handle, stack);
  const auto numbers = input.toTensor();
  input = at::where(numbers.isnan(), at::zeros_like(numbers), numbers);
  const char* overload = count > 4 ? "IntList_out" : "dim_IntList";
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::sum", overload).callBoxed(stack);
}

}  // namespace

HostKernel find_host_kernel(const std::string& qualified_name) {
  static const std::map<std::string, HostKernel> others = {
      {"aten::convolution_overrideable", convolution},
      {"aten::convolution_backward_overrideable", convolution_backward},
      {"aten::_fused_rms_norm_backward", compose_rms_norm_backward},
      {"aten::abs", abs},
      {"aten::histc", histc},
      {"aten::nansum", nansum},
      {"aten::trace", trace},
      {"aten::batch_norm_stats", batch_norm_stats},
      {"aten::batch_norm_elemt", batch_norm_elemt},
      {"aten::batch_norm_gather_stats", batch_norm_gather_stats},
      {"aten::batch_norm_gather_stats_with_counts", batch_norm_gather_stats},
      {"aten::batch_norm_backward_reduce", batch_norm_backward_reduce},
      {"aten::batch_norm_backward_elemt", batch_norm_backward_elemt},
      {"aten::_thnn_fused_lstm_cell", lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
  };
  auto found = others.find(qualified_name);
  return found == others.end() ? call_same : found->second;
}

}  // namespace ditorch
