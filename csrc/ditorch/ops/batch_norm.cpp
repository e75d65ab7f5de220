#include "ops/batch_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/var_mean.h>

#include <vector>

namespace ditorch {
namespace {

// Statistics of low-precision tensors are kept in float32, as on other accelerators.
at::Tensor in_statistics_dtype(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  const bool is_low = type == at::kHalf || type == at::kBFloat16;
  return is_low ? tensor.to(at::kFloat) : tensor;
}

// Every dimension but that of the channels.
std::vector<int64_t> reduced(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// A value for each channel, in the shape that broadcasts over `input`.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.to(in_statistics_dtype(input).scalar_type()).reshape(shape);
}

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

void update(const at::Tensor& running, const at::Tensor& seen, double momentum) {
  if (running.defined()) running.copy_(running * (1 - momentum) + seen * momentum);
}

}  // namespace

void batch_norm_stats(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 2);
  const auto& input = arguments[0].toTensor();
  const auto [variance, mean] =
      at::var_mean(in_statistics_dtype(input), reduced(input), /*unbiased=*/false);
  torch::jit::push(*stack, mean, (variance + arguments[1].toDouble()).rsqrt());
}

void batch_norm_elemt(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  const auto& input = arguments[0].toTensor();
  const auto weight = tensor_or_none(arguments[1]), bias = tensor_or_none(arguments[2]);
  auto result = (in_statistics_dtype(input) - per_channel(arguments[3].toTensor(), input)) *
                per_channel(arguments[4].toTensor(), input);
  if (weight.defined()) result = result * per_channel(weight, input);
  if (bias.defined()) result = result + per_channel(bias, input);
  result = result.to(input.scalar_type());
  if (arguments.size() <= 6) return torch::jit::push(*stack, result);
  const auto& out = arguments[6].toTensor();
  out.resize_(result.sizes());
  out.copy_(result);
  torch::jit::push(*stack, out);
}

void batch_norm_gather_stats(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 8);
  const auto &mean = arguments[1].toTensor(), &invstd = arguments[2].toTensor();
  const double momentum = arguments[5].toDouble(), eps = arguments[6].toDouble();
  const auto count =
      (arguments[7].isTensor() ? arguments[7].toTensor().to(mean.scalar_type())
                               : at::full({mean.size(0)}, arguments[7].toInt(), mean.options()))
          .reshape({-1, 1});
  const auto total = count.sum();
  const auto mean_of_all = (mean * count).sum(0) / total;
  const auto squares =
      (count * (invstd.pow(-2) - eps + (mean - mean_of_all).square())).sum(0).clamp_min(0);
  update(tensor_or_none(arguments[3]), mean_of_all, momentum);
  update(tensor_or_none(arguments[4]), squares / (total - 1), momentum);
  torch::jit::push(*stack, mean_of_all, (squares / total + eps).rsqrt());
}

void batch_norm_backward_reduce(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 8);
  const auto& input = arguments[1].toTensor();
  const auto& invstd = arguments[3].toTensor();
  const auto weight = tensor_or_none(arguments[4]);
  const auto grad = in_statistics_dtype(arguments[0].toTensor());
  const auto centred = in_statistics_dtype(input) - per_channel(arguments[2].toTensor(), input);
  const auto sum_dy = grad.sum(reduced(input));
  const auto sum_dy_xmu = (grad * centred).sum(reduced(input));
  const auto dtype = weight.defined() ? weight.scalar_type() : sum_dy.scalar_type();
  const auto wanted = [&](size_t argument, const at::Tensor& tensor) {
    return arguments[argument].toBool() ? tensor : at::Tensor();
  };
  torch::jit::push(*stack, wanted(5, sum_dy), wanted(5, sum_dy_xmu),
                   wanted(6, (sum_dy_xmu * invstd).to(dtype)), wanted(7, sum_dy.to(dtype)));
}

void batch_norm_backward_elemt(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 8);
  const auto& input = arguments[1].toTensor();
  const auto invstd = per_channel(arguments[3].toTensor(), input);
  const auto weight = tensor_or_none(arguments[4]);
  const auto total = arguments[7].toTensor().sum();
  const auto centred = in_statistics_dtype(input) - per_channel(arguments[2].toTensor(), input);
  const auto mean_dy = per_channel(arguments[5].toTensor() / total, input);
  const auto mean_dy_xmu = per_channel(arguments[6].toTensor() / total, input);
  auto grad = (in_statistics_dtype(arguments[0].toTensor()) - mean_dy -
               centred * invstd.square() * mean_dy_xmu) *
              invstd;
  if (weight.defined()) grad = grad * per_channel(weight, input);
  torch::jit::push(*stack, grad.to(input.scalar_type()));
}

}  // namespace ditorch
