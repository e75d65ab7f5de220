// Panels of a and b are packed, so that one kernel serves every layout and dtype: it computes tiles
// of kTileRows x one vector, each element one chain of multiply-adds over k.
#include "product.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "accumulator.h"
#include "elements.h"
#include "isa.h"

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

}  // namespace

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

template void multiply_matrices<float>(const Matrix&, const Matrix&, const Matrix&,
                                       const Numerics&);
template void multiply_matrices<double>(const Matrix&, const Matrix&, const Matrix&,
                                        const Numerics&);

}  // namespace emuchip
