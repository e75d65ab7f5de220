// The one way every operator reaches the chip: the vendor's kernel if there is one, else the
// host's, counted; charged either way.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ditorch {

// A boxed kernel for the PrivateUse1 key, and for every operator without a kernel of its own.
void launch(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Refuses operators on the device's sparse, quantized and (but for jagged ones) nested tensors.
void refuse_layout(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

}  // namespace ditorch
