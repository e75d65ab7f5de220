// Sums and means of a contiguous input seen as [outer, reduced, inner].
#include <algorithm>

#include "arguments.h"
#include "kernels.h"
#include "row_sum.h"
#include "rows.h"

namespace emuchip {
namespace {

struct Reduction {
  Tensor out, input;
  int64_t outer, reduced, inner;
  bool mean;
};

// inner = 1: the reduced elements lie side by side.
template <class T>
void reduce_rows(const Reduction& call, const Numerics& numerics) {
  constexpr int64_t kPart = 64 * RowSum<T>::kLanes;
  const Rows<T> inputs(call.input, call.reduced, numerics), outs(call.out, 1, numerics);
  RowSum<T> sum(numerics, call.reduced);
  std::vector<T> part(kPart);
  for (int64_t row = 0; row < call.outer; ++row) {
    sum.begin();
    for (int64_t first = 0; first < call.reduced; first += kPart) {
      const int64_t count = std::min(kPart, call.reduced - first);
      inputs.load_part(row, first, count, part.data());
      sum.add(part.data(), count);
    }
    T total = sum.total();
    if (call.mean) total /= static_cast<T>(call.reduced);
    outs.store(row, &total);
  }
}

template <class T>
void reduce_columns(const Reduction& call, const Numerics& numerics) {
  const Rows<T> inputs(call.input, call.inner, numerics), outs(call.out, call.inner, numerics);
  Accumulator<T> sums(numerics, call.reduced, call.inner);
  std::vector<T> row(call.inner);
  for (int64_t outer = 0; outer < call.outer; ++outer) {
    sums.reset();
    for (int64_t i = 0; i < call.reduced; ++i) {
      inputs.load(outer * call.reduced + i, row.data());
      sums.add(row.data());
    }
    std::copy_n(sums.total(), call.inner, row.begin());
    if (call.mean) {
      for (T& value : row) value /= static_cast<T>(call.reduced);
    }
    outs.store(outer, row.data());
  }
}

ditorch_status reduce(const char* operation, const Reduction& call) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  const ditorch_status status =
      check_rows(operation, {{"input", call.input, call.outer * call.reduced * call.inner},
                             {"out", call.out, call.outer * call.inner}});
  if (status != DITORCH_OK) return status;
  with_compute_type(call.input.dtype, *numerics, [&]<class T>(T) {
    call.inner == 1 ? reduce_rows<T>(call, *numerics) : reduce_columns<T>(call, *numerics);
  });
  return DITORCH_OK;
}

}  // namespace

ditorch_status sum(const ditorch_context*, ditorch_tensor* out, const ditorch_tensor* input,
                   int64_t outer, int64_t reduced, int64_t inner) {
  return reduce("sum", {read_tensor(out), read_tensor(input), outer, reduced, inner, false});
}

ditorch_status mean(const ditorch_context*, ditorch_tensor* out, const ditorch_tensor* input,
                    int64_t outer, int64_t reduced, int64_t inner) {
  return reduce("mean", {read_tensor(out), read_tensor(input), outer, reduced, inner, true});
}

}  // namespace emuchip
