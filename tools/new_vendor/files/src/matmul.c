/* Products of float32 matrices of any strides. */
#include "chip.h"
#include "kernels.h"

/* A float32 tensor of two or three dimensions as a batch of matrices; strides in elements. */
typedef struct matrices {
  float* data;
  int64_t count, rows, columns;
  int64_t stride, row_stride, column_stride;
} matrices;

static int read_matrices(const ditorch_tensor* tensor, matrices* read) {
  const int32_t dimensions = tensors->dimensions(tensor);
  if (tensors->dtype(tensor) != DITORCH_FLOAT32 || dimensions < 2 || dimensions > 3) return 0;
  const int64_t* sizes = tensors->sizes(tensor) + dimensions - 2;
  const int64_t* strides = tensors->strides(tensor) + dimensions - 2;
  *read = (matrices){.data = chip_bytes(tensors->data(tensor)),
                     .count = dimensions == 3 ? sizes[-1] : 1,
                     .rows = sizes[0],
                     .columns = sizes[1],
                     .stride = dimensions == 3 ? strides[-1] : 0,
                     .row_stride = strides[0],
                     .column_stride = strides[1]};
  return 1;
}

/* REPLACE the loops by a launch of your kernel on context->stream. */
ditorch_status matmul(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* a,
                      const ditorch_tensor* b) {
  (void)context;
  matrices z, x, y;
  if (!read_matrices(out, &z) || !read_matrices(a, &x) || !read_matrices(b, &y)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  for (int64_t i = 0; i < z.count; ++i) {
    for (int64_t row = 0; row < z.rows; ++row) {
      for (int64_t column = 0; column < z.columns; ++column) {
        const float* left = x.data + i * x.stride + row * x.row_stride;
        const float* right = y.data + i * y.stride + column * y.column_stride;
        double sum = 0;
        for (int64_t k = 0; k < x.columns; ++k) {
          sum += (double)left[k * x.column_stride] * (double)right[k * y.row_stride];
        }
        z.data[i * z.stride + row * z.row_stride + column * z.column_stride] = (float)sum;
      }
    }
  }
  return DITORCH_OK;
}
