// How the host computes an operator, on CPU tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace ditorch {

// Replaces the operator's arguments on the stack by its results.
using HostKernel = void (*)(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

// Almost always the CPU's kernel of the same operator; a few operators exist for other devices
// only, and have a CPU operator that does the same.
HostKernel find_host_kernel(const std::string& qualified_name);

}  // namespace ditorch
