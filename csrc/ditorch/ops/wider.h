// Operators that the host has no kernel for in a dtype that CUDA has one for: computed in the next
// wider dtype, and rounded once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "ops/operator.h"

namespace ditorch {

// Replaces the operator's arguments, which are tensors of the host, by its results.
void compute_on_host(const c10::OperatorHandle& handle, const Operator& op,
                     torch::jit::Stack* stack);

}  // namespace ditorch
