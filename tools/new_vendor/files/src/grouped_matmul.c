/* Products of groups of rows, such as those of experts. */
#include "chip.h"
#include "elements.h"
#include "kernels.h"

/* The sum of `depth` products from two places on; strides in elements. */
static double dot(const ditorch_grouped_matmul* call, int64_t a, int64_t a_stride, int64_t b,
                  int64_t b_stride, int64_t depth) {
  double sum = 0;
  for (int64_t k = 0; k < depth; ++k) {
    sum += read_number(chip_bytes(call->a.data), call->dtype, a + k * a_stride) *
           read_number(chip_bytes(call->b.data), call->dtype, b + k * b_stride);
  }
  return sum;
}

/* REPLACE. */
ditorch_status grouped_matmul(const ditorch_context* context, const ditorch_grouped_matmul* call) {
  (void)context;
  if (!is_floating(call->dtype)) return DITORCH_NOT_IMPLEMENTED;
  const int64_t *a = call->a.strides, *b = call->b.strides, *out = call->out.strides;
  const int32_t* ends = chip_bytes(call->ends);
  void* to = chip_bytes(call->out.data);
  for (int64_t g = 0, first = 0; g < call->groups; first = ends[g++]) {
    const int64_t count = ends[g] - first, rows = call->along_depth ? call->rows : count;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t n = 0; n < call->columns; ++n) {
        if (call->along_depth) {
          write_number(
              to, call->dtype, g * out[0] + row * out[1] + n * out[2],
              dot(call, row * a[0] + first * a[1], a[1], first * b[0] + n * b[1], b[0], count));
        } else {
          write_number(
              to, call->dtype, (first + row) * out[0] + n * out[1],
              dot(call, (first + row) * a[0], a[1], g * b[0] + n * b[2], b[1], call->depth));
        }
      }
    }
  }
  return DITORCH_OK;
}
