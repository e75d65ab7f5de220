#include "tensor.h"

#include "chip.h"

namespace emuchip {
namespace {

ditorch_tensor_accessors accessors = {};  // all NULL until ditorch gives them

}  // namespace

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int32_t i = 0; i < dimensions; ++i) count *= sizes[i];
  return count;
}

bool Tensor::contiguous() const {
  if (elements() == 0) return true;
  int64_t expected = 1;
  for (int32_t i = dimensions - 1; i >= 0; --i) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

bool Tensor::floating() const {
  return dtype == DITORCH_FLOAT32 || dtype == DITORCH_FLOAT64 || dtype == DITORCH_FLOAT16 ||
         dtype == DITORCH_BFLOAT16;
}

void set_tensor_accessors(const ditorch_tensor_accessors& given) { accessors = given; }

Tensor read_tensor(const ditorch_tensor* handle) {
  if (!handle) return {};
  return {.data = static_cast<char*>(accessors.data(handle)),
          .dtype = accessors.dtype(handle),
          .dimensions = accessors.dimensions(handle),
          .sizes = accessors.sizes(handle),
          .strides = accessors.strides(handle)};
}

const Numerics* own_numerics() {
  const Chip& chip = process_chip();
  return !accessors.data || !chip.error.empty() || chip.file.numerics.neutral ? nullptr
                                                                              : &chip.file.numerics;
}

}  // namespace emuchip
