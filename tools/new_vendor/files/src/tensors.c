#include "kernels.h"

const ditorch_tensor_accessors* tensors;

ditorch_status set_accessors(const ditorch_tensor_accessors* accessors) {
  tensors = accessors;
  return DITORCH_OK;
}

int64_t elements_of(const ditorch_tensor* tensor) {
  int64_t count = 1;
  for (int32_t d = 0; d < tensors->dimensions(tensor); ++d) count *= tensors->sizes(tensor)[d];
  return count;
}
