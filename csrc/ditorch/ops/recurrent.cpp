#include "ops/recurrent.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "ops/optional_tensor.h"

namespace ditorch {
namespace {

at::Tensor plus(const at::Tensor& gates, const at::Tensor& bias) {
  return bias.defined() ? gates + bias : gates;
}

// Derivatives of sigmoid and tanh, from their results.
at::Tensor sigmoid_slope(const at::Tensor& y) { return y * (1 - y); }
at::Tensor tanh_slope(const at::Tensor& y) { return 1 - y * y; }

}  // namespace

// (input_gates, hidden_gates, cx, input_bias, hidden_bias) -> (hy, cy, workspace)
void lstm_cell(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 5);
  const auto gates = plus(arguments[0].toTensor(), optional_tensor(arguments[3])) +
                     plus(arguments[1].toTensor(), optional_tensor(arguments[4]));
  const auto parts = gates.chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(),
             out = parts[3].sigmoid();
  const auto cy = forget * arguments[2].toTensor() + in * cell;
  torch::jit::push(*stack, out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1));
}

// (grad_hy, grad_cy, cx, cy, workspace, has_bias) -> (grad_gates, grad_cx, grad_bias)
void lstm_cell_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 6);
  const auto cx = arguments[2].toTensor();
  auto grad_hy = optional_tensor(arguments[0]);
  if (!grad_hy.defined()) grad_hy = at::zeros_like(cx);
  const auto tanh_cy = arguments[3].toTensor().tanh();
  const auto parts = arguments[4].toTensor().chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];

  const auto grad_cy = plus(grad_hy * out * tanh_slope(tanh_cy), optional_tensor(arguments[1]));
  const auto grad_gates =
      at::cat({grad_cy * cell * sigmoid_slope(in), grad_cy * cx * sigmoid_slope(forget),
               grad_cy * in * tanh_slope(cell), grad_hy * tanh_cy * sigmoid_slope(out)},
              1);
  const auto grad_bias = arguments[5].toBool() ? grad_gates.sum(0) : at::Tensor();
  torch::jit::push(*stack, grad_gates, grad_cy * forget, grad_bias);
}

// (input_gates, hidden_gates, hx, input_bias, hidden_bias) -> (hy, workspace)
void gru_cell(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 5);
  const auto input = plus(arguments[0].toTensor(), optional_tensor(arguments[3])).chunk(3, 1);
  const auto hidden = plus(arguments[1].toTensor(), optional_tensor(arguments[4])).chunk(3, 1);
  const auto hx = arguments[2].toTensor();
  const auto reset = (input[0] + hidden[0]).sigmoid();
  const auto update = (input[1] + hidden[1]).sigmoid();
  const auto fresh = (input[2] + reset * hidden[2]).tanh();
  torch::jit::push(*stack, fresh + update * (hx - fresh),
                   at::cat({reset, update, fresh, hx, hidden[2]}, 1));
}

// (grad_hy, workspace, has_bias) -> (grad_input_gates, grad_hidden_gates, grad_hx,
//                                    grad_input_bias, grad_hidden_bias)
void gru_cell_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 3);
  const auto grad_hy = arguments[0].toTensor();
  const auto parts = arguments[1].toTensor().chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3],
             &hidden = parts[4];

  const auto grad_fresh = grad_hy * (1 - update) * tanh_slope(fresh);
  const auto grad_update = grad_hy * (hx - fresh) * sigmoid_slope(update);
  const auto grad_reset = grad_fresh * hidden * sigmoid_slope(reset);
  const auto grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  const bool has_bias = arguments[2].toBool();
  torch::jit::push(*stack, grad_input, grad_hidden, grad_hy * update,
                   has_bias ? grad_input.sum(0) : at::Tensor(),
                   has_bias ? grad_hidden.sum(0) : at::Tensor());
}

}  // namespace ditorch
