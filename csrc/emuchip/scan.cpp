// Running sums along one dimension.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "kernels.h"
#include "program.h"
#include "rows.h"

namespace emuchip {
namespace {

// Sums of integers, which wrap as unsigned ones do.
template <class S>
void scan_integers(const ditorch_scan& call) {
  const S* input = static_cast<const S*>(call.input);
  S* out = static_cast<S*>(call.out);
  for (int64_t o = 0; o < call.outer; ++o) {
    for (int64_t n = 0; n < call.inner; ++n) {
      uint64_t sum = 0;
      for (int64_t i = 0; i < call.length; ++i) {
        const int64_t at = (o * call.length + i) * call.inner + n;
        sum += static_cast<uint64_t>(input[at]);
        out[at] = static_cast<S>(sum);
      }
    }
  }
}

// One after the other, in the dtype that the chip computes in, and each rounded as it is kept.
template <class T>
void scan_floats(const ditorch_scan& call, const Numerics& numerics) {
  std::vector<T> sums(static_cast<size_t>(call.inner)), kept(sums.size());
  visit_storage(call.dtype, [&]<class S>(S*) {
    const S* input = static_cast<const S*>(call.input);
    S* out = static_cast<S*>(call.out);
    for (int64_t row = 0; row < call.outer * call.length; ++row) {
      if (row % call.length == 0) std::fill(sums.begin(), sums.end(), T(0));
      for (int64_t n = 0; n < call.inner; ++n) kept[n] = from_storage<T>(input[n]);
      if (numerics.flush_to_zero) flush_subnormals(kept.data(), call.inner, call.dtype);
      for (int64_t n = 0; n < call.inner; ++n) kept[n] = sums[n] += kept[n];
      if (numerics.flush_to_zero) flush_subnormals(kept.data(), call.inner, call.dtype);
      for (int64_t n = 0; n < call.inner; ++n) out[n] = to_storage<S>(kept[n]);
      input += call.inner;
      out += call.inner;
    }
  });
}

}  // namespace

ditorch_status scan(const ditorch_context*, const ditorch_scan* call) {
  const Numerics* numerics = own_numerics();
  if (!numerics || !is_storage(call->dtype) || call->dtype == DITORCH_BOOL) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  if (is_floating(call->dtype)) {
    with_compute_type(call->dtype, *numerics,
                      [&]<class T>(T) { scan_floats<T>(*call, *numerics); });
    return DITORCH_OK;
  }
  visit_any_storage(call->dtype, [&]<class S>(S*) {
    if constexpr (std::is_integral_v<S>) scan_integers<S>(*call);
  });
  return DITORCH_OK;
}

}  // namespace emuchip
