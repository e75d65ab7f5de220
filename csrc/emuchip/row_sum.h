// The sum of a row, in the chip's order: a vector's lanes each sum every so manieth element, then
// the lanes are added up.
#pragma once

#include "accumulator.h"

namespace emuchip {

template <class T>
class RowSum {
 public:
  // A vector register of 64 bytes; parts of a row must be whole multiples of it, but the last.
  static constexpr int64_t kLanes = 64 / sizeof(T);

  RowSum(const Numerics& numerics, int64_t length)
      : pairwise_(numerics.order == Order::kPairwise),
        lanes_(numerics, (length + kLanes - 1) / kLanes, kLanes),
        length_(length) {}

  T operator()(const T* row) {
    begin();
    add(row, length_);
    return total();
  }

  void begin() { lanes_.reset(); }

  void add(const T* part, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) lanes_.add(part + i);
    if (i == count) return;
    T rest[kLanes] = {};
    std::copy(part + i, part + count, rest);
    lanes_.add(rest);
  }

  T total() const {
    T sums[kLanes];
    std::copy_n(lanes_.total(), kLanes, sums);
    if (pairwise_) {
      for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
      }
    } else {
      for (int64_t i = 1; i < kLanes; ++i) sums[0] += sums[i];
    }
    return sums[0];
  }

 private:
  const bool pairwise_;
  Accumulator<T> lanes_;
  const int64_t length_;
};

}  // namespace emuchip
