#include "tensor.h"

namespace opencl {
namespace {

ditorch_tensor_accessors accessors = {};

}  // namespace

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int32_t i = 0; i < dimensions; ++i) count *= sizes[i];
  return count;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int32_t i = dimensions - 1; i >= 0; --i) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
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

bool is_floating(ditorch_dtype dtype) {
  return dtype == DITORCH_FLOAT32 || dtype == DITORCH_FLOAT64 || dtype == DITORCH_FLOAT16 ||
         dtype == DITORCH_BFLOAT16;
}

std::string name_of(const Device& device, ditorch_dtype dtype) {
  switch (dtype) {
    case DITORCH_FLOAT32:
      return "f32";
    case DITORCH_FLOAT64:
      return device.has_double ? "f64" : "";
    case DITORCH_FLOAT16:
      return "f16";
    case DITORCH_BFLOAT16:
      return "bf16";
    default:
      return "";
  }
}

std::string element_of(const Device& device, ditorch_dtype dtype) {
  switch (dtype) {
    case DITORCH_INT8:
      return "i8";
    case DITORCH_INT16:
      return "i16";
    case DITORCH_INT32:
      return "i32";
    case DITORCH_INT64:
      return "i64";
    case DITORCH_UINT8:
      return "u8";
    case DITORCH_BOOL:
      return "bool";
    default:
      return name_of(device, dtype);
  }
}

size_t bytes_of(ditorch_dtype dtype) {
  switch (dtype) {
    case DITORCH_FLOAT64:
    case DITORCH_INT64:
      return 8;
    case DITORCH_FLOAT32:
    case DITORCH_INT32:
      return 4;
    case DITORCH_FLOAT16:
    case DITORCH_BFLOAT16:
    case DITORCH_INT16:
      return 2;
    default:
      return 1;
  }
}

// A processor's widest registers; a GPU's items work side by side and want little each.
int vector_width(const Device& device, ditorch_dtype computed) {
  if (!device.is_cpu) return 4;
  return computed == DITORCH_FLOAT64 ? 8 : 16;
}

std::string compute_options(const Device& device, ditorch_dtype computed) {
  return std::string("-cl-std=CL1.2 -DCOMPUTE=") +
         (computed == DITORCH_FLOAT64 ? "double" : "float") +
         " -DWIDTH=" + std::to_string(vector_width(device, computed)) +
         (device.has_double ? " -DHAS_DOUBLE" : "");
}

}  // namespace opencl
