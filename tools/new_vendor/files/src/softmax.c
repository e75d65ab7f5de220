/* Softmax over rows, which are the last dimension of contiguous tensors of one dtype. */
#include <math.h>

#include "chip.h"
#include "elements.h"
#include "kernels.h"

/* Tensors of one shape as rows of `length` elements. */
typedef struct rows {
  const void *x, *y;
  void* out;
  ditorch_dtype dtype;
  int64_t elements, length;
} rows;

/* `y` may be NULL. */
static rows read_rows(const ditorch_tensor* x, const ditorch_tensor* y, ditorch_tensor* out) {
  const int32_t dimensions = tensors->dimensions(x);
  return (rows){.x = chip_bytes(tensors->data(x)),
                .y = y ? chip_bytes(tensors->data(y)) : NULL,
                .out = chip_bytes(tensors->data(out)),
                .dtype = tensors->dtype(x),
                .elements = elements_of(x),
                .length = dimensions ? tensors->sizes(x)[dimensions - 1] : 1};
}

/* The row's largest element, which is taken off before the exponential, and the sum of these. */
static void extent(const rows* all, int64_t row, double* largest, double* sum) {
  *largest = -INFINITY;
  *sum = 0;
  for (int64_t i = row; i < row + all->length; ++i) {
    const double value = read_number(all->x, all->dtype, i);
    if (value > *largest) *largest = value;
  }
  for (int64_t i = row; i < row + all->length; ++i) {
    *sum += exp(read_number(all->x, all->dtype, i) - *largest);
  }
}

/* REPLACE these four. */
ditorch_status softmax(const ditorch_context* context, ditorch_tensor* out,
                       const ditorch_tensor* input) {
  (void)context;
  const rows all = read_rows(input, NULL, out);
  for (int64_t row = 0; row < all.elements; row += all.length) {
    double largest, sum;
    extent(&all, row, &largest, &sum);
    for (int64_t i = row; i < row + all.length; ++i) {
      const double value = exp(read_number(all.x, all.dtype, i) - largest);
      write_number(all.out, all.dtype, i, value / sum);
    }
  }
  return DITORCH_OK;
}

ditorch_status log_softmax(const ditorch_context* context, ditorch_tensor* out,
                           const ditorch_tensor* input) {
  (void)context;
  const rows all = read_rows(input, NULL, out);
  for (int64_t row = 0; row < all.elements; row += all.length) {
    double largest, sum;
    extent(&all, row, &largest, &sum);
    for (int64_t i = row; i < row + all.length; ++i) {
      const double value = read_number(all.x, all.dtype, i) - largest;
      write_number(all.out, all.dtype, i, value - log(sum));
    }
  }
  return DITORCH_OK;
}

ditorch_status softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                const ditorch_tensor* grad_output, const ditorch_tensor* output) {
  (void)context;
  const rows all = read_rows(grad_output, output, grad_input);
  for (int64_t row = 0; row < all.elements; row += all.length) {
    double sum = 0;
    for (int64_t i = row; i < row + all.length; ++i) {
      sum += read_number(all.x, all.dtype, i) * read_number(all.y, all.dtype, i);
    }
    for (int64_t i = row; i < row + all.length; ++i) {
      const double grad = read_number(all.x, all.dtype, i) - sum;
      write_number(all.out, all.dtype, i, read_number(all.y, all.dtype, i) * grad);
    }
  }
  return DITORCH_OK;
}

ditorch_status log_softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                    const ditorch_tensor* grad_output,
                                    const ditorch_tensor* output) {
  (void)context;
  const rows all = read_rows(grad_output, output, grad_input);
  for (int64_t row = 0; row < all.elements; row += all.length) {
    double sum = 0;
    for (int64_t i = row; i < row + all.length; ++i) sum += read_number(all.x, all.dtype, i);
    for (int64_t i = row; i < row + all.length; ++i) {
      const double chance = exp(read_number(all.y, all.dtype, i));
      write_number(all.out, all.dtype, i, read_number(all.x, all.dtype, i) - chance * sum);
    }
  }
  return DITORCH_OK;
}
