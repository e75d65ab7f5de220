// One product of matrices, and the ways of computing it.
#pragma once

#include <vector>

#include "stream.h"
#include "tensor.h"

namespace opencl {

// Of a batch of matrices, in elements; the kernels know it by the same layout.
struct Strides {
  cl_long batch, row, column;
};

struct Matrices {
  char* data;
  Strides at;
};

// out[n, rows, columns] = a[n, rows, depth] @ b[n, depth, columns]
struct Product {
  ditorch_dtype dtype;
  int64_t batches, rows, columns, depth;
  Matrices out, a, b;
};

// A way of computing it: from packed panels, straight from memory, or by CLBlast.
enum class Way { packed, direct, clblast };

// What the cache of measurements knows it by.
const char* name_of(Way way);

// The ways open to the product on this device, the likeliest first.
std::vector<Way> ways_of(const Device& device, const Product& product);

void compute(Submission& submission, const Product& product, Way way);

// Whether CLBlast takes the product; where it is not built in, never.
bool clblast_takes(const Device& device, const Product& product);
void compute_by_clblast(Submission& submission, const Product& product);

// The fastest way for products of this class of shapes: measured when the device first meets the
// class, and kept in the cache.
Way choose_way(Submission& submission, const Product& product);

}  // namespace opencl
