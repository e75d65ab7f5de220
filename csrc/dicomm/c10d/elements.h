// Which of dicomm's reductions a torch tensor asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collective/reduction.h"

namespace dicomm {

struct Reduction {
  DataType type;
  ReduceOp op;
  std::size_t numbers_per_element;  // 2: a complex number is its real and its imaginary part

  bool operator==(const Reduction&) const = default;
};

// The type as torch names it.
c10::ScalarType scalar_type(DataType type);

// Throws ValueError or TypeError where the elements have no such reduction.
Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace dicomm
