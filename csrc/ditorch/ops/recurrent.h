// Cells of LSTM and GRU as one operator each. torch fuses them on accelerators but has no such
// operator for the CPU, so the host composes them here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ditorch {

// The boxed arguments and results are those of aten::_thnn_fused_{lstm,gru}_cell and of
// aten::_thnn_fused_lstm_cell_backward_impl and aten::_thnn_fused_gru_cell_backward.
void lstm_cell(const c10::OperatorHandle&, torch::jit::Stack* stack);
void lstm_cell_backward(const c10::OperatorHandle&, torch::jit::Stack* stack);
void gru_cell(const c10::OperatorHandle&, torch::jit::Stack* stack);
void gru_cell_backward(const c10::OperatorHandle&, torch::jit::Stack* stack);

}  // namespace ditorch
