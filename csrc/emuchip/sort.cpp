// Rows put in order, whole or only the first of it.
#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "kernels.h"
#include "program.h"
#include "rows.h"

namespace emuchip {
namespace {

// What elements of a dtype are compared as; every element is one of its values exactly.
template <class S>
using Key = std::conditional_t<std::is_integral_v<S>, int64_t, double>;

template <class S>
Key<S> key(S element) {
  if constexpr (std::is_integral_v<S>) {
    return static_cast<int64_t>(element);
  } else {
    return from_storage<double>(element);
  }
}

template <class K>
bool is_less(K a, K b) {
  return a < b || (b != b && a == a);  // NaN is the largest
}

template <class S>
void sort_rows(const ditorch_sort& call) {
  const S* input = static_cast<const S*>(call.input);
  S* values = static_cast<S*>(call.values);
  int64_t* places = call.places;
  std::vector<Key<S>> keys(static_cast<size_t>(call.length));
  std::vector<int64_t> order(keys.size());
  const auto comes_first = [&](int64_t a, int64_t b) {
    if (is_less(keys[a], keys[b])) return !call.descending;
    if (is_less(keys[b], keys[a])) return call.descending != 0;
    return a < b;
  };
  for (int64_t row = 0; row < call.rows; ++row) {
    std::transform(input, input + call.length, keys.begin(), key<S>);
    std::iota(order.begin(), order.end(), int64_t{0});
    if (call.kept == call.length) {
      std::sort(order.begin(), order.end(), comes_first);
    } else {
      std::partial_sort(order.begin(), order.begin() + call.kept, order.end(), comes_first);
    }
    for (int64_t i = 0; i < call.kept; ++i) {
      values[i] = input[order[i]];
      places[i] = order[i];
    }
    input += call.length;
    values += call.kept;
    places += call.kept;
  }
}

}  // namespace

ditorch_status sort(const ditorch_context*, const ditorch_sort* call) {
  if (!own_numerics() || !is_storage(call->dtype)) return DITORCH_NOT_IMPLEMENTED;
  visit_any_storage(call->dtype, [&]<class S>(S*) { sort_rows<S>(*call); });
  return DITORCH_OK;
}

}  // namespace emuchip
