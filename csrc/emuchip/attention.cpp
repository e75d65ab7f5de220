// Attention block by block: the scores of some queries with some keys at a time, of which none is
// kept, and a softmax whose largest score and sum are those of the keys so far (FlashAttention).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elements.h"
#include "kernels.h"
#include "philox.h"
#include "product.h"
#include "row_sum.h"
#include "rows.h"
#include "special.h"

namespace emuchip {
namespace {

constexpr int64_t kQueries = 64, kKeys = 128;  // of a block
constexpr bool kFast =
    false;  // fused kernels bring an exponential of their own, as FlashAttention-4

// Rows of one head.
Matrix rows_of(const ditorch_operand& operand, ditorch_dtype dtype, int64_t batch, int64_t head,
               int64_t first, int64_t rows, int64_t columns) {
  const int64_t* strides = operand.strides;
  const int64_t offset = batch * strides[0] + head * strides[1] + first * strides[2];
  return {static_cast<char*>(operand.data) + offset * element_bytes(dtype),
          dtype,
          rows,
          columns,
          strides[2],
          strides[3]};
}

// A matrix of its own memory, in which the chip computes.
template <class T>
class Block {
 public:
  Block(int64_t rows, int64_t columns) : values_(rows * columns), stride_(columns) {}

  T* row(int64_t i) { return values_.data() + i * stride_; }
  void clear() { std::fill(values_.begin(), values_.end(), T(0)); }

  Matrix matrix(int64_t rows, int64_t columns, int64_t first = 0) {
    constexpr ditorch_dtype kDtype =
        sizeof(T) == sizeof(double) ? DITORCH_FLOAT64 : DITORCH_FLOAT32;
    return {reinterpret_cast<char*>(row(first)), kDtype, rows, columns, stride_, 1};
  }

 private:
  std::vector<T> values_;
  int64_t stride_;
};

template <class T>
void load(const Matrix& matrix, int64_t row, const Numerics& numerics, T* values) {
  visit_storage(matrix.dtype, [&]<class S>(S*) {
    const S* from = reinterpret_cast<const S*>(matrix.data) + row * matrix.row_stride;
    for (int64_t i = 0; i < matrix.columns; ++i) {
      values[i] = from_storage<T>(from[i * matrix.column_stride]);
    }
  });
  if (numerics.flush_to_zero) flush_subnormals(values, matrix.columns, matrix.dtype);
}

template <class T>
void store(const Matrix& matrix, int64_t row, const Numerics& numerics, T* values) {
  if (numerics.flush_to_zero) flush_subnormals(values, matrix.columns, matrix.dtype);
  visit_storage(matrix.dtype, [&]<class S>(S*) {
    S* to = reinterpret_cast<S*>(matrix.data) + row * matrix.row_stride;
    for (int64_t i = 0; i < matrix.columns; ++i) {
      to[i * matrix.column_stride] = to_storage<S>(values[i]);
    }
  });
}

// Products take operands of the tensors' dtype: what goes into a second one is rounded to it first.
template <class T>
void round_to(ditorch_dtype dtype, T* values, int64_t count) {
  visit_storage(dtype, [&]<class S>(S*) {
    for (int64_t i = 0; i < count; ++i) values[i] = from_storage<T>(to_storage<S>(values[i]));
  });
}

// Queries and keys among which all is seen that is: those of a sequence, or of one document.
struct Rows {
  int64_t first_query, end_of_queries, first_key, end_of_keys;
};

std::vector<Rows> sequences_of(const ditorch_attention& call) {
  if (!call.ends) return {{0, call.queries, 0, call.keys}};
  std::vector<Rows> found;
  int64_t first = 0;
  for (int64_t i = 0; i < call.documents; ++i) {
    const int64_t end = call.ends[i];
    if (end > first) found.push_back({first, end, first, end});
    first = end;
  }
  return found;
}

// What forward and backward share: a call, and the blocks that they walk.
template <class T>
class Attention {
 public:
  Attention(const ditorch_attention& call, const Numerics& numerics)
      : call_(call),
        numerics_(numerics),
        sequences_(sequences_of(call)),
        scores_(kQueries, kKeys),
        mixed_(kQueries, call.value_size),
        part_(kQueries, call.value_size),
        slopes_(kQueries, kKeys),
        row_(kKeys) {}

  void forward() {
    for (int64_t batch = 0; batch < call_.batch; ++batch) {
      for (int64_t head = 0; head < call_.heads; ++head) {
        for_each_block([&](const Queries& block) { mix(batch, head, block); });
      }
    }
  }

  void backward(const ditorch_attention_backward& gradients) {
    Block<T> grad_key(call_.keys, call_.size), grad_value(call_.keys, call_.value_size);
    const int64_t sharing = call_.heads / call_.kv_heads;
    for (int64_t batch = 0; batch < call_.batch; ++batch) {
      for (int64_t kv_head = 0; kv_head < call_.kv_heads; ++kv_head) {
        grad_key.clear();
        grad_value.clear();
        for (int64_t head = kv_head * sharing; head < (kv_head + 1) * sharing; ++head) {
          for_each_block([&](const Queries& block) {
            differentiate(gradients, batch, head, block, grad_key, grad_value);
          });
        }
        store_rows(grad_key, rows_of(gradients.grad_key, call_.dtype, batch, kv_head, 0, call_.keys,
                                     call_.size));
        store_rows(grad_value, rows_of(gradients.grad_value, call_.dtype, batch, kv_head, 0,
                                       call_.keys, call_.value_size));
      }
    }
  }

 private:
  int64_t kv_head_of(int64_t head) const { return head / (call_.heads / call_.kv_heads); }

  // A block of queries, and the keys that one of them sees at least.
  struct Queries {
    int64_t first, rows, first_key, end_of_keys;
  };

  template <class Use>
  void for_each_block(Use use) const {
    for (const Rows& of : sequences_) {
      for (int64_t first = of.first_query; first < of.end_of_queries; first += kQueries) {
        const int64_t rows = std::min(kQueries, of.end_of_queries - first);
        const int64_t oldest = call_.window ? first + 1 - call_.window : of.first_key;
        const int64_t end = call_.causal ? first + rows : of.end_of_keys;
        use(Queries{first, rows, std::max(of.first_key, oldest), std::min(of.end_of_keys, end)});
      }
    }
  }

  Matrix keys(const ditorch_operand& operand, int64_t batch, int64_t head, int64_t first,
              int64_t count, int64_t columns) const {
    return rows_of(operand, call_.dtype, batch, kv_head_of(head), first, count, columns);
  }

  // Scores near the soft cap as a hyperbolic tangent does; slopes are how fast they still rise.
  void cap(T* scores, T* slopes, int64_t columns) const {
    const T largest = static_cast<T>(call_.soft_cap);
    for (int64_t j = 0; j < columns; ++j) scores[j] /= largest;
    tanh(scores, scores, columns);
    for (int64_t j = 0; j < columns; ++j) {
      slopes[j] = (T(1) - scores[j]) * (T(1) + scores[j]);
      scores[j] *= largest;
    }
  }

  // What weights of a query are multiplied by in row_, from first_key on: 0 where they are dropped.
  const std::vector<T>& kept(int64_t batch, int64_t head, int64_t query, int64_t first_key,
                             int64_t columns) {
    const int64_t row = (batch * call_.heads + head) * call_.queries + query;
    random_numbers(static_cast<uint64_t>(call_.dropout_key), row * call_.keys + first_key,
                   row_.data(), columns);
    const T kept_share = static_cast<float>(1 - call_.dropout);
    const T scale = static_cast<T>(1 / (1 - call_.dropout));
    for (int64_t j = 0; j < columns; ++j) row_[j] = row_[j] < kept_share ? scale : T(0);
    return row_;
  }

  // scores_[q][k], minus infinity where a query does not see a key. Of capped ones slopes_, too.
  void score(int64_t batch, int64_t head, int64_t first_query, int64_t rows, int64_t first_key,
             int64_t columns) {
    const auto query =
        rows_of(call_.query, call_.dtype, batch, head, first_query, rows, call_.size);
    const auto key = keys(call_.key, batch, head, first_key, columns, call_.size);
    multiply_matrices<T>(scores_.matrix(rows, columns), query, key.transposed(), numerics_);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = scores_.row(i);
      for (int64_t j = 0; j < columns; ++j) row[j] *= static_cast<T>(call_.scale);
      if (call_.soft_cap != 0) cap(row, slopes_.row(i), columns);
      if (call_.bias.data) {
        auto bias = rows_of(call_.bias, call_.dtype, batch, head, first_query + i, 1, columns);
        bias.data += first_key * bias.column_stride * element_bytes(call_.dtype);
        load(bias, 0, numerics_, row_.data());
        for (int64_t j = 0; j < columns; ++j) row[j] += row_[j];
      }
      if (!call_.causal) continue;
      constexpr T kUnseen = -std::numeric_limits<T>::infinity();
      const int64_t later = first_query + i + 1 - first_key;  // the first column that is
      std::fill(row + std::clamp<int64_t>(later, 0, columns), row + columns, kUnseen);
      if (!call_.window) continue;
      std::fill(row, row + std::clamp<int64_t>(later - call_.window, 0, columns), kUnseen);
    }
  }

  // out and log_sum_exp of a block of queries.
  void mix(int64_t batch, int64_t head, const Queries& block) {
    constexpr T kNothing = -std::numeric_limits<T>::infinity();
    const int64_t first = block.first, rows = block.rows, width = call_.value_size;
    std::vector<T> largest(rows, kNothing), total(rows);
    mixed_.clear();
    for (int64_t key = block.first_key; key < block.end_of_keys; key += kKeys) {
      const int64_t columns = std::min(kKeys, block.end_of_keys - key);
      score(batch, head, first, rows, key, columns);
      RowSum<T> sum(numerics_, columns);
      for (int64_t i = 0; i < rows; ++i) {
        T* row = scores_.row(i);
        const T before = largest[i];
        for (int64_t j = 0; j < columns; ++j)
          largest[i] = row[j] > largest[i] ? row[j] : largest[i];
        // What no key was seen of yet has nothing to be scaled, and its powers are all zero.
        const T shift = largest[i] == kNothing ? T(0) : largest[i];
        T scale = before - shift;
        exp_nonpositive(&scale, 1, kFast);
        for (int64_t j = 0; j < columns; ++j) row[j] -= shift;
        exp_nonpositive(row, columns, kFast);
        total[i] = total[i] * scale + sum(row);
        if (call_.dropout != 0) multiply(row, kept(batch, head, first + i, key, columns), columns);
        round_to(call_.dtype, row, columns);
        T* mixed = mixed_.row(i);
        for (int64_t j = 0; j < width; ++j) mixed[j] *= scale;
      }
      multiply_matrices<T>(part_.matrix(rows, width), scores_.matrix(rows, columns),
                           keys(call_.value, batch, head, key, columns, width), numerics_);
      add(mixed_, part_, rows, width);
    }
    const auto out = rows_of(call_.out, call_.dtype, batch, head, first, rows, width);
    std::vector<T> sums(rows);
    for (int64_t i = 0; i < rows; ++i) {
      T* mixed = mixed_.row(i);
      for (int64_t j = 0; j < width; ++j) mixed[j] = total[i] == T(0) ? T(0) : mixed[j] / total[i];
      store(out, i, numerics_, mixed);
      sums[i] = total[i] == T(0) ? kNothing : largest[i] + std::log(total[i]);
    }
    store(saved_sums(batch, head, first, rows), 0, numerics_, sums.data());
  }

  // Adds what a block of queries gives to grad_key and grad_value, and writes its grad_query.
  void differentiate(const ditorch_attention_backward& gradients, int64_t batch, int64_t head,
                     const Queries& block, Block<T>& grad_key, Block<T>& grad_value) {
    const int64_t first = block.first, rows = block.rows;
    const int64_t size = call_.size, width = call_.value_size;
    const auto query = rows_of(call_.query, call_.dtype, batch, head, first, rows, size);
    const auto grad_out = rows_of(gradients.grad_out, call_.dtype, batch, head, first, rows, width);
    std::vector<T> sums(rows), dots = row_dots(grad_out, batch, head, first, rows);
    load(saved_sums(batch, head, first, rows), 0, numerics_, sums.data());
    Block<T> grad_query(rows, size), of_queries(rows, size), grad_scores(rows, kKeys);
    Block<T> of_keys(kKeys, size), of_values(kKeys, width);
    for (int64_t at = block.first_key; at < block.end_of_keys; at += kKeys) {
      const int64_t columns = std::min(kKeys, block.end_of_keys - at);
      const auto key = keys(call_.key, batch, head, at, columns, size);
      const auto value = keys(call_.value, batch, head, at, columns, width);
      const auto powers = scores_.matrix(rows, columns);
      const auto grads = grad_scores.matrix(rows, columns);
      score(batch, head, first, rows, at, columns);
      multiply_matrices<T>(grads, grad_out, value.transposed(), numerics_);
      for (int64_t i = 0; i < rows; ++i) {
        T *power = scores_.row(i), *grad = grad_scores.row(i);
        const bool sees_nothing = std::isinf(sums[i]) && sums[i] < 0;
        // Rounding may leave a score a little above the sum of all.
        for (int64_t j = 0; j < columns; ++j) {
          const T below = power[j] - (sees_nothing ? T(0) : sums[i]);
          power[j] = below > T(0) ? T(0) : below;
        }
        exp_nonpositive(power, columns, kFast);
        const bool drops = call_.dropout != 0;
        if (drops) multiply(grad, kept(batch, head, first + i, at, columns), columns);
        for (int64_t j = 0; j < columns; ++j) {
          grad[j] = power[j] * (grad[j] - dots[i]) * static_cast<T>(call_.scale);
        }
        if (call_.soft_cap != 0) multiply(grad, slopes_.row(i), columns);
        if (drops) multiply(power, row_, columns);
        round_to(call_.dtype, power, columns);
        round_to(call_.dtype, grad, columns);
      }
      multiply_matrices<T>(of_values.matrix(columns, width), powers.transposed(), grad_out,
                           numerics_);
      add(grad_value, of_values, columns, width, at);
      multiply_matrices<T>(of_keys.matrix(columns, size), grads.transposed(), query, numerics_);
      add(grad_key, of_keys, columns, size, at);
      multiply_matrices<T>(of_queries.matrix(rows, size), grads, key, numerics_);
      add(grad_query, of_queries, rows, size);
    }
    store_rows(grad_query,
               rows_of(gradients.grad_query, call_.dtype, batch, head, first, rows, size));
  }

  // The product of each row's output with its gradient: what softmax's backward takes off.
  std::vector<T> row_dots(const Matrix& grad_out, int64_t batch, int64_t head, int64_t first,
                          int64_t rows) const {
    const int64_t width = call_.value_size;
    const auto out = rows_of(call_.out, call_.dtype, batch, head, first, rows, width);
    std::vector<T> found(rows), values(width), grads(width);
    RowSum<T> sum(numerics_, width);
    for (int64_t i = 0; i < rows; ++i) {
      load(out, i, numerics_, values.data());
      load(grad_out, i, numerics_, grads.data());
      for (int64_t j = 0; j < width; ++j) values[j] *= grads[j];
      found[i] = sum(values.data());
    }
    return found;
  }

  // log_sum_exp of a block of queries, as one row.
  Matrix saved_sums(int64_t batch, int64_t head, int64_t first, int64_t rows) const {
    const auto dtype = call_.dtype == DITORCH_FLOAT64 ? DITORCH_FLOAT64 : DITORCH_FLOAT32;
    const int64_t offset = (batch * call_.heads + head) * call_.queries + first;
    return {static_cast<char*>(call_.log_sum_exp) + offset * element_bytes(dtype),
            dtype,
            1,
            rows,
            rows,
            1};
  }

  template <class Factors>
  static void multiply(T* values, const Factors& factors, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j) values[j] *= factors[j];
  }

  static void add(Block<T>& sums, Block<T>& more, int64_t rows, int64_t columns,
                  int64_t first = 0) {
    for (int64_t i = 0; i < rows; ++i) {
      T *to = sums.row(first + i), *from = more.row(i);
      for (int64_t j = 0; j < columns; ++j) to[j] += from[j];
    }
  }

  void store_rows(Block<T>& block, const Matrix& to) const {
    for (int64_t i = 0; i < to.rows; ++i) store(to, i, numerics_, block.row(i));
  }

  const ditorch_attention& call_;
  const Numerics& numerics_;
  const std::vector<Rows> sequences_;
  Block<T> scores_, mixed_, part_, slopes_;
  std::vector<T> row_;  // biases of a query, or what its weights are multiplied by
};

// Whether every query is in a document, and every document within the keys.
bool are_ends_of_documents(const ditorch_attention& call) {
  int64_t last;
  return !call.ends || (are_ascending(call.ends, call.documents, last) && last == call.queries &&
                        last <= call.keys);
}

// The chip's numerics, if it computes the call.
const Numerics* numerics_for(const ditorch_attention& call) {
  const Numerics* numerics = own_numerics();
  return is_floating(call.dtype) && are_ends_of_documents(call) ? numerics : nullptr;
}

}  // namespace

ditorch_status attention(const ditorch_context*, const ditorch_attention* call) {
  const Numerics* numerics = numerics_for(*call);
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  with_compute_type(call->dtype, *numerics,
                    [&]<class T>(T) { Attention<T>(*call, *numerics).forward(); });
  return DITORCH_OK;
}

ditorch_status attention_backward(const ditorch_context*, const ditorch_attention_backward* call) {
  const Numerics* numerics = numerics_for(*call->forward);
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  with_compute_type(call->forward->dtype, *numerics,
                    [&]<class T>(T) { Attention<T>(*call->forward, *numerics).backward(*call); });
  return DITORCH_OK;
}

}  // namespace emuchip
