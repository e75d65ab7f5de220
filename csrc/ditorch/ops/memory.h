// Operators that make, reshape and copy memory without computing anything.
#pragma once

#include <torch/library.h>

namespace ditorch {

void register_memory_operators(torch::Library& library);

}  // namespace ditorch
