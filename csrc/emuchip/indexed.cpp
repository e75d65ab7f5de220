// Elements of a table that an index names: gathered, added to, or replaced.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "accumulator.h"
#include "elements.h"
#include "kernels.h"
#include "program.h"
#include "rows.h"
#include "tensor.h"

namespace emuchip {
namespace {

// A place of the walk for which the index is the same: where its elements begin, in elements.
struct Start {
  int64_t dense;
  int64_t table;  // kSkipped where the index names nothing
};

constexpr int64_t kSkipped = -1;

// The dimensions along which places name other elements or the same ones, or those of a row.
struct Dimensions {
  std::vector<int64_t> sizes, dense, table, index;

  void add(const ditorch_indexed& call, int32_t dimension) {
    sizes.push_back(call.sizes[dimension]);
    dense.push_back(call.dense.strides[dimension]);
    table.push_back(call.table.strides[dimension]);
    index.push_back(call.index.strides[dimension]);
  }

  int64_t elements() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }

  // Calls visit with the offsets of dense, table and index for every place.
  template <class Visit>
  void walk(Visit visit) const {
    std::vector<int64_t> place(sizes.size());
    int64_t in_dense = 0, in_table = 0, in_index = 0;
    while (true) {
      visit(in_dense, in_table, in_index);
      size_t dimension = sizes.size();
      for (; dimension > 0; --dimension) {
        const size_t d = dimension - 1;
        const bool wraps = ++place[d] == sizes[d];
        const int64_t steps = wraps ? 1 - sizes[d] : 1;
        in_dense += steps * dense[d];
        in_table += steps * table[d];
        in_index += steps * index[d];
        if (!wraps) break;
        place[d] = 0;
      }
      if (dimension == 0) return;
    }
  }
};

class Indexed {
 public:
  explicit Indexed(const ditorch_indexed& call) : call_(call) {
    for (int32_t dimension = 0; dimension < call.dimensions; ++dimension) {
      const bool is_row = call.index.strides[dimension] == 0 && call.table.strides[dimension] != 0;
      (is_row ? row_ : outer_).add(call, dimension);
    }
  }

  const Dimensions& row() const { return row_; }

  // The beginning of every row; nothing where an index is not one of the table's.
  std::optional<std::vector<Start>> starts() const {
    std::vector<Start> found;
    found.reserve(static_cast<size_t>(outer_.elements()));
    bool good = true;
    outer_.walk([&](int64_t dense, int64_t table, int64_t at) {
      const int64_t index = index_at(at);
      const bool skipped = index == call_.skipped;
      good &= skipped || (index >= 0 && index < call_.table_length);
      found.push_back({dense, skipped ? kSkipped : table + index * call_.table_stride});
    });
    if (!good) return std::nullopt;
    return found;
  }

 private:
  int64_t index_at(int64_t at) const {
    if (call_.index.dtype == DITORCH_INT32)
      return static_cast<const int32_t*>(call_.index.data)[at];
    return static_cast<const int64_t*>(call_.index.data)[at];
  }

  const ditorch_indexed& call_;
  Dimensions outer_, row_;
};

bool is_taken(const ditorch_indexed& call) {
  return own_numerics() && is_storage(call.dense.dtype) && call.dense.dtype == call.table.dtype &&
         (call.index.dtype == DITORCH_INT64 || call.index.dtype == DITORCH_INT32);
}

template <class S>
void gather_rows(const ditorch_indexed& call, const Dimensions& row,
                 const std::vector<Start>& starts) {
  S* const dense = static_cast<S*>(call.dense.data);
  const S* const table = static_cast<const S*>(call.table.data);
  const bool is_run = row.sizes.size() == 1 && row.dense[0] == 1 && row.table[0] == 1;
  for (const Start& start : starts) {
    if (is_run && start.table != kSkipped) {
      std::memcpy(dense + start.dense, table + start.table, sizeof(S) * row.sizes[0]);
      continue;
    }
    row.walk([&](int64_t in_dense, int64_t in_table, int64_t) {
      dense[start.dense + in_dense] = start.table == kSkipped ? S{} : table[start.table + in_table];
    });
  }
}

// Of rows that name one row of the table the last stays.
template <class S>
void scatter_rows(const ditorch_indexed& call, const Dimensions& row,
                  const std::vector<Start>& starts) {
  const S* const dense = static_cast<const S*>(call.dense.data);
  S* const table = static_cast<S*>(call.table.data);
  for (const Start& start : starts) {
    if (start.table == kSkipped) continue;
    row.walk([&](int64_t in_dense, int64_t in_table, int64_t) {
      table[start.table + in_table] = dense[start.dense + in_dense];
    });
  }
}

// Rows that name one row of the table are summed in the chip's order, then added to it.
template <class T, class S>
void add_rows(const ditorch_indexed& call, const Dimensions& row, std::vector<Start> starts,
              const Numerics& numerics) {
  const S* const dense = static_cast<const S*>(call.dense.data);
  S* const table = static_cast<S*>(call.table.data);
  std::erase_if(starts, [](const Start& start) { return start.table == kSkipped; });
  std::stable_sort(starts.begin(), starts.end(),
                   [](const Start& a, const Start& b) { return a.table < b.table; });
  const int64_t width = row.elements();
  std::vector<T> values(static_cast<size_t>(width));
  for (auto first = starts.begin(); first != starts.end();) {
    const int64_t to = first->table;
    const auto last =
        std::find_if(first, starts.end(), [to](const Start& start) { return start.table != to; });
    Accumulator<T> sums(numerics, last - first, width);
    for (; first != last; ++first) {
      int64_t i = 0;
      row.walk([&](int64_t in_dense, int64_t, int64_t) {
        values[i++] = from_storage<T>(dense[first->dense + in_dense]);
      });
      sums.add(values.data());
    }
    int64_t i = 0;
    row.walk([&](int64_t, int64_t in_table, int64_t) {
      values[i] = from_storage<T>(table[to + in_table]) + sums.total()[i];
      ++i;
    });
    if (numerics.flush_to_zero) flush_subnormals(values.data(), width, call.table.dtype);
    i = 0;
    row.walk([&](int64_t, int64_t in_table, int64_t) {
      table[to + in_table] = to_storage<S>(values[i++]);
    });
  }
}

// Calls move with a null pointer to the storage type, the row and where every row begins.
template <class Move>
ditorch_status move_rows(const ditorch_indexed& call, Move move) {
  if (!is_taken(call)) return DITORCH_NOT_IMPLEMENTED;
  const Indexed indexed(call);
  const auto starts = indexed.starts();
  if (!starts) return DITORCH_NOT_IMPLEMENTED;
  visit_any_storage(call.dense.dtype,
                    [&]<class S>(S* storage) { move(storage, indexed.row(), *starts); });
  return DITORCH_OK;
}

}  // namespace

ditorch_status gather(const ditorch_context*, const ditorch_indexed* call) {
  return move_rows(*call, [call]<class S>(S*, const auto& row, const auto& starts) {
    gather_rows<S>(*call, row, starts);
  });
}

ditorch_status scatter(const ditorch_context*, const ditorch_indexed* call) {
  return move_rows(*call, [call]<class S>(S*, const auto& row, const auto& starts) {
    scatter_rows<S>(*call, row, starts);
  });
}

ditorch_status scatter_add(const ditorch_context*, const ditorch_indexed* call) {
  if (!is_taken(*call) || !is_floating(call->dense.dtype)) return DITORCH_NOT_IMPLEMENTED;
  const Numerics& numerics = *own_numerics();
  const Indexed indexed(*call);
  auto starts = indexed.starts();
  if (!starts) return DITORCH_NOT_IMPLEMENTED;
  visit_storage(call->dense.dtype, [&]<class S>(S*) {
    with_compute_type(call->dense.dtype, numerics, [&]<class T>(T) {
      add_rows<T, S>(*call, indexed.row(), std::move(*starts), numerics);
    });
  });
  return DITORCH_OK;
}

}  // namespace emuchip
