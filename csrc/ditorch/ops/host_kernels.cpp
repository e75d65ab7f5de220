#include "ops/host_kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "ops/recurrent.h"

namespace ditorch {
namespace {

void call_same(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
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
void rms_norm_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
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

}  // namespace

HostKernel find_host_kernel(const std::string& qualified_name) {
  static const std::map<std::string, HostKernel> others = {
      {"aten::convolution_overrideable", convolution},
      {"aten::convolution_backward_overrideable", convolution_backward},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
      {"aten::_thnn_fused_lstm_cell", lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
  };
  auto found = others.find(qualified_name);
  return found == others.end() ? call_same : found->second;
}

}  // namespace ditorch
