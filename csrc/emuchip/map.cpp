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

using Rectangles = std::array<Rectangle, DITORCH_MAP_OPERANDS>;

// Over the last two dimensions at once, which the others repeat.
template <class T>
void run_over(const ditorch_map& call, const Program<T>& program) {
  const int32_t last = call.dimensions - 1;
  const int64_t rows = last > 0 ? call.sizes[last - 1] : 1, columns = call.sizes[last];
  std::array<int64_t, kMostDimensions> index{};
  Rectangles operands{};
  for (int32_t i = 0; i < call.operand_count; ++i) {
    const auto& [data, dtype, strides] = call.operands[i];
    operands[i] = {static_cast<char*>(data), dtype, last > 0 ? strides[last - 1] : 0,
                   strides[last]};
  }
  for (int64_t number = 0;; number += rows * columns) {
    program(operands.data(), rows, columns, number);
    int32_t dimension = last - 2;
    for (; dimension >= 0; --dimension) {
      const bool wraps = ++index[dimension] == call.sizes[dimension];
      const int64_t steps = wraps ? 1 - call.sizes[dimension] : 1;
      for (int32_t i = 0; i < call.operand_count; ++i) {
        const ditorch_operand& operand = call.operands[i];
        operands[i].data += steps * operand.strides[dimension] * bytes_of(operand.dtype);
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
    Rectangles operands{};
    for (int32_t i = 0; i < call->call_count; ++i) {
      void* const* data = call->data + static_cast<int64_t>(i) * call->operand_count;
      for (int32_t operand = 0; operand < call->operand_count; ++operand) {
        operands[operand] = {static_cast<char*>(data[operand]), call->dtypes[operand],
                             /*row_stride=*/0, call->strides[operand]};
      }
      program(operands.data(), /*rows=*/1, call->elements[i], /*number=*/0);
    }
  });
  return DITORCH_OK;
}

}  // namespace emuchip
