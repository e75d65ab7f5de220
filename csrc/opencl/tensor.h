// A tensor as the kernels see it: where it is and how it is laid out.
#pragma once

#include <cstdint>
#include <string>

#include "device.h"
#include "operators.h"

namespace opencl {

struct Tensor {
  char* data = nullptr;
  ditorch_dtype dtype = DITORCH_OTHER;
  int32_t dimensions = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // in elements

  explicit operator bool() const { return sizes != nullptr; }  // false: an absent argument
  int64_t elements() const;
  bool is_contiguous() const;
};

void set_tensor_accessors(const ditorch_tensor_accessors& accessors);

// NULL gives an absent tensor.
Tensor read_tensor(const ditorch_tensor* handle);

bool is_floating(ditorch_dtype dtype);

// What the kernels call a dtype: f32, f64, f16 or bf16; empty if the device has no kernel for it.
std::string name_of(const Device& device, ditorch_dtype dtype);
// The same of any dtype: i8, i16, i32, i64, u8 and bool as well.
std::string element_of(const Device& device, ditorch_dtype dtype);
size_t bytes_of(ditorch_dtype dtype);

// The options of a program that computes in `computed`: -DCOMPUTE, -DWIDTH and -DHAS_DOUBLE.
std::string compute_options(const Device& device, ditorch_dtype computed);
int vector_width(const Device& device, ditorch_dtype computed);

}  // namespace opencl
