// A contiguous tensor as rows of equal length, computed on as T (float or double).
#pragma once

#include <vector>

#include "elements.h"
#include "tensor.h"

namespace emuchip {

template <class T>
class Rows {
 public:
  Rows(const Tensor& tensor, int64_t length, const Numerics& numerics)
      : tensor_(tensor), length_(length), flush_(numerics.flush_to_zero) {}

  explicit operator bool() const { return static_cast<bool>(tensor_); }

  void load(int64_t row, T* values) const { load_part(row, 0, length_, values); }

  void load_part(int64_t row, int64_t first, int64_t count, T* values) const {
    const char* from = tensor_.data + (row * length_ + first) * element_bytes(tensor_.dtype);
    visit_storage(tensor_.dtype, [&]<class S>(S*) {
      const S* elements = reinterpret_cast<const S*>(from);
      for (int64_t i = 0; i < count; ++i) values[i] = from_storage<T>(elements[i]);
    });
    if (flush_) flush_subnormals(values, count, tensor_.dtype);
  }

  // `values` is flushed in place where the chip flushes. An absent tensor takes nothing.
  void store(int64_t row, T* values) const {
    if (!tensor_) return;
    if (flush_) flush_subnormals(values, length_, tensor_.dtype);
    char* to = tensor_.data + row * length_ * element_bytes(tensor_.dtype);
    visit_storage(tensor_.dtype, [&]<class S>(S*) {
      S* elements = reinterpret_cast<S*>(to);
      for (int64_t i = 0; i < length_; ++i) elements[i] = to_storage<S>(values[i]);
    });
  }

  // One row as a vector of its own; `absent` everywhere if there is no tensor.
  std::vector<T> load_or(T absent) const {
    std::vector<T> values(length_, absent);
    if (tensor_) load(0, values.data());
    return values;
  }

 private:
  Tensor tensor_;
  int64_t length_;
  bool flush_;
};

// Whether the ends of what lies one after the other ascend from 0; `last` becomes the last of them.
inline bool are_ascending(const int32_t* ends, int64_t count, int64_t& last) {
  last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (ends[i] < last) return false;
    last = ends[i];
  }
  return true;
}

// Calls compute with a T{} of the type a chip computes this dtype in.
template <class Compute>
void with_compute_type(ditorch_dtype dtype, const Numerics& numerics, Compute compute) {
  if (dtype == DITORCH_FLOAT64 || numerics.accumulate == Accumulate::kFloat64) {
    compute(double{});
  } else {
    compute(float{});
  }
}

}  // namespace emuchip
