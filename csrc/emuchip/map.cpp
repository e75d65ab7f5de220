// Elementwise programs over strided tensors, and over lists of dense ones.
#include <algorithm>
#include <array>

#include "elements.h"
#include "kernels.h"
#include "program.h"
#include "tensor.h"

namespace emuchip {
namespace {

constexpr int32_t kMostDimensions = 64;

int64_t bytes_of(ditorch_dtype dtype) {
  switch (dtype) {
    case DITORCH_INT8:
    case DITORCH_UINT8:
    case DITORCH_BOOL:
      return 1;
    case DITORCH_INT16:
      return 2;
    case DITORCH_INT32:
      return 4;
    case DITORCH_INT64:
      return 8;
    default:
      return element_bytes(dtype);
  }
}

using Runs = std::array<Run, DITORCH_MAP_OPERANDS>;

// Runs along the last dimension, which the others repeat.
template <class T>
void run_over(const ditorch_map& call, const Program<T>& program) {
  const int32_t outer = call.dimensions - 1;
  std::array<int64_t, kMostDimensions> index{};
  Runs runs{};
  for (int32_t i = 0; i < call.operand_count; ++i) {
    const ditorch_operand& operand = call.operands[i];
    runs[i] = {static_cast<char*>(operand.data), operand.dtype, operand.strides[outer]};
  }
  for (int64_t number = 0;; number += call.sizes[outer]) {
    program(runs.data(), call.sizes[outer], number);
    int32_t dimension = outer - 1;
    for (; dimension >= 0; --dimension) {
      const bool wraps = ++index[dimension] == call.sizes[dimension];
      const int64_t steps = wraps ? 1 - call.sizes[dimension] : 1;
      for (int32_t i = 0; i < call.operand_count; ++i) {
        const ditorch_operand& operand = call.operands[i];
        runs[i].data += steps * operand.strides[dimension] * bytes_of(operand.dtype);
      }
      if (!wraps) break;
      index[dimension] = 0;
    }
    if (dimension < 0) return;
  }
}

}  // namespace

ditorch_status map(const ditorch_context*, const ditorch_map* call) {
  const Numerics* numerics = own_numerics();
  if (!numerics || call->dimensions < 1 || call->dimensions > kMostDimensions ||
      call->operand_count > static_cast<int32_t>(DITORCH_MAP_OPERANDS) ||
      !is_runnable(call->compute, call->instructions, call->instruction_count,
                   call->operand_count) ||
      !std::all_of(call->operands, call->operands + call->operand_count,
                   [](const ditorch_operand& operand) { return is_storage(operand.dtype); })) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  with_stack_type(call->compute, [&]<class T>(T) {
    run_over(*call, Program<T>(call->instructions, call->instruction_count, *numerics));
  });
  return DITORCH_OK;
}

ditorch_status map_list(const ditorch_context*, const ditorch_map_list* call) {
  const Numerics* numerics = own_numerics();
  if (!numerics || call->operand_count > static_cast<int32_t>(DITORCH_MAP_OPERANDS) ||
      !is_runnable(call->compute, call->instructions, call->instruction_count,
                   call->operand_count) ||
      !std::all_of(call->dtypes, call->dtypes + call->operand_count, is_storage)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  with_stack_type(call->compute, [&]<class T>(T) {
    const Program<T> program(call->instructions, call->instruction_count, *numerics);
    Runs runs{};
    for (int32_t i = 0; i < call->call_count; ++i) {
      void* const* data = call->data + static_cast<int64_t>(i) * call->operand_count;
      for (int32_t operand = 0; operand < call->operand_count; ++operand) {
        runs[operand] = {static_cast<char*>(data[operand]), call->dtypes[operand],
                         call->strides[operand]};
      }
      program(runs.data(), call->elements[i], /*number=*/0);
    }
  });
  return DITORCH_OK;
}

}  // namespace emuchip
