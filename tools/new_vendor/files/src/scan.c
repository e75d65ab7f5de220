/* Sums of all elements up to each, along the middle of a contiguous [outer, length, inner]. */
#include "chip.h"
#include "elements.h"
#include "kernels.h"

/* REPLACE. */
ditorch_status scan(const ditorch_context* context, const ditorch_scan* call) {
  (void)context;
  if (!is_known(call->dtype)) return DITORCH_NOT_IMPLEMENTED;
  const void* from = chip_bytes(call->input);
  void* to = chip_bytes(call->out);
  for (int64_t o = 0; o < call->outer; ++o) {
    for (int64_t n = 0; n < call->inner; ++n) {
      double sum = 0;
      uint64_t whole = 0; /* of integers; unsigned, so that it may wrap */
      for (int64_t i = 0; i < call->length; ++i) {
        const int64_t at = (o * call->length + i) * call->inner + n;
        if (is_floating(call->dtype)) {
          write_number(to, call->dtype, at, sum += read_number(from, call->dtype, at));
        } else {
          whole += (uint64_t)read_integer(from, call->dtype, at);
          write_integer(to, call->dtype, at, (int64_t)whole);
        }
      }
    }
  }
  return DITORCH_OK;
}
