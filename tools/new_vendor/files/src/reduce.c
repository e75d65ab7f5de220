/* Sums and means over the middle of a contiguous [outer, reduced, inner]. */
#include "chip.h"
#include "elements.h"
#include "kernels.h"

static ditorch_status reduce(ditorch_tensor* out, const ditorch_tensor* input, int64_t outer,
                             int64_t reduced, int64_t inner, double divisor) {
  const void* from = chip_bytes(tensors->data(input));
  void* to = chip_bytes(tensors->data(out));
  const ditorch_dtype dtype = tensors->dtype(input), rounded = tensors->dtype(out);
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t n = 0; n < inner; ++n) {
      double total = 0;
      for (int64_t i = 0; i < reduced; ++i) {
        total += read_number(from, dtype, (o * reduced + i) * inner + n);
      }
      write_number(to, rounded, o * inner + n, total / divisor);
    }
  }
  return DITORCH_OK;
}

/* REPLACE both. */
ditorch_status sum(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* input,
                   int64_t outer, int64_t reduced, int64_t inner) {
  (void)context;
  return reduce(out, input, outer, reduced, inner, 1);
}

ditorch_status mean(const ditorch_context* context, ditorch_tensor* out,
                    const ditorch_tensor* input, int64_t outer, int64_t reduced, int64_t inner) {
  (void)context;
  return reduce(out, input, outer, reduced, inner, (double)reduced);
}
