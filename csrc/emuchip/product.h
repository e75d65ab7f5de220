// Products of matrices in the chip's order and precision.
#pragma once

#include "chip_file.h"
#include "operators.h"

namespace emuchip {

// A matrix of any floating dtype; strides in elements.
struct Matrix {
  char* data;
  ditorch_dtype dtype;
  int64_t rows, columns, row_stride, column_stride;

  Matrix transposed() const { return {data, dtype, columns, rows, column_stride, row_stride}; }
};

// out = a @ b, computed as T (float or double). out overlaps neither.
template <class T>
void multiply_matrices(const Matrix& out, const Matrix& a, const Matrix& b,
                       const Numerics& numerics);

}  // namespace emuchip
