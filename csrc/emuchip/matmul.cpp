// Products of matrices. Panels of a and b are packed, so that one kernel serves every layout and
// dtype: it computes tiles of kTileRows x one vector, each element one chain of multiply-adds over
// k.
#include <algorithm>
#include <cstring>
#include <vector>

#include "accumulator.h"
#include "error.h"
#include "isa.h"
#include "kernels.h"
#include "rows.h"

namespace emuchip {
namespace {

constexpr int64_t kTileRows = 6;  // with one vector each: what fits the registers of every x86
constexpr int64_t kVectorBytes = 64;
constexpr int64_t kPackedBytes = 512 * 1024;  // of a at a time: stays in the second-level cache

template <class T>
constexpr int64_t kTileColumns = kVectorBytes / sizeof(T);

// tile[i][j] = sum over k of a[k][i] * b[k][j]
template <class T>
[[gnu::always_inline]] inline void multiply(const T* a, const T* b, int64_t depth, T* tile) {
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  Vector sums[kTileRows] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector row;
    std::memcpy(&row, b + k * kTileColumns<T>, sizeof row);
    for (int64_t i = 0; i < kTileRows; ++i) sums[i] += a[k * kTileRows + i] * row;
  }
  std::memcpy(tile, sums, sizeof sums);
}

EMUCHIP_CLONES void multiply_tile(const float* a, const float* b, int64_t depth, float* tile) {
  multiply(a, b, depth, tile);
}

EMUCHIP_CLONES void multiply_tile(const double* a, const double* b, int64_t depth, double* tile) {
  multiply(a, b, depth, tile);
}

// One matrix of a batch; strides in elements.
struct Matrix {
  char* data;
  ditorch_dtype dtype;
  int64_t rows, columns, row_stride, column_stride;

  Matrix transposed() const { return {data, dtype, columns, rows, column_stride, row_stride}; }
};

Matrix matrix_of(const Tensor& tensor, int64_t batch) {
  const int32_t last = tensor.dimensions - 1;
  const int64_t offset = tensor.dimensions == 3 ? batch * tensor.strides[0] : 0;
  return {tensor.data + offset * element_bytes(tensor.dtype),
          tensor.dtype,
          tensor.sizes[last - 1],
          tensor.sizes[last],
          tensor.strides[last - 1],
          tensor.strides[last]};
}

// panel[k][i] = matrix[k][first + i], zero beyond the last column.
template <class T>
void pack(const Matrix& matrix, int64_t first, int64_t width, bool flush, T* panel) {
  const int64_t depth = matrix.rows;
  const int64_t count = std::min(width, matrix.columns - first);
  if (count < width) std::fill_n(panel, depth * width, T(0));
  visit_storage(matrix.dtype, [&]<class S>(S*) {
    const S* from = reinterpret_cast<const S*>(matrix.data) + first * matrix.column_stride;
    if (matrix.column_stride == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        const S* row = from + k * matrix.row_stride;
        for (int64_t i = 0; i < count; ++i) panel[k * width + i] = from_storage<T>(row[i]);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const S* column = from + i * matrix.column_stride;
        for (int64_t k = 0; k < depth; ++k) {
          panel[k * width + i] = from_storage<T>(column[k * matrix.row_stride]);
        }
      }
    }
  });
  if (flush) flush_subnormals(panel, depth * width, matrix.dtype);
}

template <class T>
void store_tile(const Matrix& out, int64_t row, int64_t column, const T* tile, bool flush) {
  T values[kTileRows * kTileColumns<T>];
  std::copy_n(tile, kTileRows * kTileColumns<T>, values);
  if (flush) flush_subnormals(values, kTileRows * kTileColumns<T>, out.dtype);
  const int64_t rows = std::min(kTileRows, out.rows - row);
  const int64_t columns = std::min(kTileColumns<T>, out.columns - column);
  visit_storage(out.dtype, [&]<class S>(S*) {
    S* to = reinterpret_cast<S*>(out.data) + row * out.row_stride + column * out.column_stride;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        to[i * out.row_stride + j * out.column_stride] =
            to_storage<S>(values[i * kTileColumns<T> + j]);
      }
    }
  });
}

template <class T>
void multiply_matrices(const Matrix& out, const Matrix& a, const Matrix& b,
                       const Numerics& numerics) {
  const int64_t depth = a.columns;
  const bool flush = numerics.flush_to_zero;
  const int64_t fitting =
      kPackedBytes / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(1, depth);
  const int64_t panels_at_once = std::max<int64_t>(16, fitting / kTileRows);
  const int64_t a_panels = (out.rows + kTileRows - 1) / kTileRows;
  std::vector<T> packed_a(std::min(panels_at_once, a_panels) * depth * kTileRows);
  std::vector<T> packed_b(depth * kTileColumns<T>);
  Accumulator<T> sums(numerics, depth, kTileRows * kTileColumns<T>);
  alignas(kVectorBytes) T tile[kTileRows * kTileColumns<T>];

  for (int64_t first = 0; first < a_panels; first += panels_at_once) {
    const int64_t last = std::min(first + panels_at_once, a_panels);
    for (int64_t panel = first; panel < last; ++panel) {
      pack(a.transposed(), panel * kTileRows, kTileRows, flush,
           packed_a.data() + (panel - first) * depth * kTileRows);
    }
    for (int64_t column = 0; column < out.columns; column += kTileColumns<T>) {
      pack(b, column, kTileColumns<T>, flush, packed_b.data());
      for (int64_t panel = first; panel < last; ++panel) {
        const T* a_panel = packed_a.data() + (panel - first) * depth * kTileRows;
        sums.reset();
        for (int64_t k = 0; k < depth;) {
          const int64_t end = sums.block_end();
          multiply_tile(a_panel + k * kTileRows, packed_b.data() + k * kTileColumns<T>, end - k,
                        tile);
          sums.add_block(tile);
          k = end;
        }
        store_tile(out, panel * kTileRows, column, sums.total(), flush);
      }
    }
  }
}

ditorch_status check_shapes(const Tensor& out, const Tensor& a, const Tensor& b) {
  for (const Tensor* tensor : {&out, &a, &b}) {
    if (!tensor->floating() || tensor->dtype != a.dtype) return DITORCH_NOT_IMPLEMENTED;
    if (tensor->dimensions != a.dimensions || (a.dimensions != 2 && a.dimensions != 3)) {
      return DITORCH_NOT_IMPLEMENTED;
    }
  }
  const Matrix o = matrix_of(out, 0), x = matrix_of(a, 0), y = matrix_of(b, 0);
  const bool same_batch =
      a.dimensions == 2 || (out.sizes[0] == a.sizes[0] && out.sizes[0] == b.sizes[0]);
  if (!same_batch || o.rows != x.rows || o.columns != y.columns || x.columns != y.rows) {
    return fail(DITORCH_INVALID, "matmul: [%lld, %lld] @ [%lld, %lld] does not give [%lld, %lld]%s",
                static_cast<long long>(x.rows), static_cast<long long>(x.columns),
                static_cast<long long>(y.rows), static_cast<long long>(y.columns),
                static_cast<long long>(o.rows), static_cast<long long>(o.columns),
                same_batch ? "" : ", and the batches differ");
  }
  return DITORCH_OK;
}

}  // namespace

ditorch_status matmul(const ditorch_context*, ditorch_tensor* out_handle,
                      const ditorch_tensor* a_handle, const ditorch_tensor* b_handle) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  const Tensor out = read_tensor(out_handle), a = read_tensor(a_handle), b = read_tensor(b_handle);
  const ditorch_status status = check_shapes(out, a, b);
  if (status != DITORCH_OK || out.elements() == 0) return status;
  const int64_t batches = out.dimensions == 3 ? out.sizes[0] : 1;
  with_compute_type(a.dtype, *numerics, [&]<class T>(T) {
    for (int64_t i = 0; i < batches; ++i) {
      multiply_matrices<T>(matrix_of(out, i), matrix_of(a, i), matrix_of(b, i), *numerics);
    }
  });
  return DITORCH_OK;
}

}  // namespace emuchip
