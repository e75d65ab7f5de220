// Products of groups, each as matmul.cpp's.
#include "elements.h"
#include "kernels.h"
#include "product.h"
#include "rows.h"
#include "tensor.h"

namespace emuchip {
namespace {

// A matrix whose first element is so many elements into an operand; strides in elements.
Matrix matrix_at(const ditorch_operand& operand, ditorch_dtype dtype, int64_t offset, int64_t rows,
                 int64_t columns, int64_t row_stride, int64_t column_stride) {
  return {static_cast<char*>(operand.data) + offset * element_bytes(dtype),
          dtype,
          rows,
          columns,
          row_stride,
          column_stride};
}

template <class T>
void multiply_groups(const ditorch_grouped_matmul& call, const Numerics& numerics) {
  const int64_t *a = call.a.strides, *b = call.b.strides, *out = call.out.strides;
  for (int64_t group = 0, first = 0; group < call.groups; ++group) {
    const int64_t count = call.ends[group] - first;
    if (call.along_depth) {
      multiply_matrices<T>(
          matrix_at(call.out, call.dtype, group * out[0], call.rows, call.columns, out[1], out[2]),
          matrix_at(call.a, call.dtype, first * a[1], call.rows, count, a[0], a[1]),
          matrix_at(call.b, call.dtype, first * b[0], count, call.columns, b[0], b[1]), numerics);
    } else if (count > 0) {
      multiply_matrices<T>(
          matrix_at(call.out, call.dtype, first * out[0], count, call.columns, out[0], out[1]),
          matrix_at(call.a, call.dtype, first * a[0], count, call.depth, a[0], a[1]),
          matrix_at(call.b, call.dtype, group * b[0], call.depth, call.columns, b[1], b[2]),
          numerics);
    }
    first = call.ends[group];
  }
}

// Whether the ends ascend within what is grouped.
bool are_ends_of_groups(const ditorch_grouped_matmul& call) {
  int64_t last;
  return are_ascending(call.ends, call.groups, last) &&
         last <= (call.along_depth ? call.depth : call.rows);
}

}  // namespace

ditorch_status grouped_matmul(const ditorch_context*, const ditorch_grouped_matmul* call) {
  const Numerics* numerics = own_numerics();
  if (!numerics || !is_floating(call->dtype) || !are_ends_of_groups(*call)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  with_compute_type(call->dtype, *numerics,
                    [&]<class T>(T) { multiply_groups<T>(*call, *numerics); });
  return DITORCH_OK;
}

}  // namespace emuchip
