// Batch norm over several chips, part by part, as torch.nn.SyncBatchNorm asks for it. torch has
// these parts for accelerators only, so the host composes them here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ditorch {

// The boxed arguments and results are those of the aten operators batch_norm_stats, _elemt,
// _gather_stats, _gather_stats_with_counts, _backward_reduce and _backward_elemt.
void batch_norm_stats(const c10::OperatorHandle&, torch::jit::Stack* stack);
void batch_norm_elemt(const c10::OperatorHandle&, torch::jit::Stack* stack);
void batch_norm_gather_stats(const c10::OperatorHandle&, torch::jit::Stack* stack);
void batch_norm_backward_reduce(const c10::OperatorHandle&, torch::jit::Stack* stack);
void batch_norm_backward_elemt(const c10::OperatorHandle&, torch::jit::Stack* stack);

}  // namespace ditorch
