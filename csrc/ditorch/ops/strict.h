// Strict mode: an operator that the host would compute in the chip's stead is an error.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace ditorch {

void set_strict(bool strict);
bool is_strict();

// The module whose forward the calling thread is in, for the error; empty outside of any.
void set_module(std::string name);

// Throws in strict mode: names the operator, the dtypes of its arguments and the module.
void refuse_host(const c10::OperatorHandle& handle, c10::ArrayRef<c10::IValue> arguments);

}  // namespace ditorch
