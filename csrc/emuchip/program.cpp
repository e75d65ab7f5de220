#include "program.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "elements.h"
#include "isa.h"
#include "philox.h"
#include "special.h"

namespace emuchip {
namespace {

constexpr int64_t kBlock = 512;  // elements of one loop: the whole stack stays in the first cache

template <class T, class S>
T loaded(S element) {
  if constexpr (std::is_same_v<S, Half> || std::is_same_v<S, Bfloat16>) {
    return static_cast<T>(from_storage<float>(element));
  } else {
    return static_cast<T>(element);
  }
}

template <class S, class T>
S stored(T value) {
  if constexpr (std::is_same_v<S, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<S, Bfloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<S, bool>) {
    return value != T(0);
  } else if constexpr (std::is_integral_v<S>) {
    return static_cast<S>(static_cast<int64_t>(value));  // modulo the width
  } else {
    return static_cast<S>(value);
  }
}

#define INLINE [[gnu::always_inline]] inline

template <class T, class Function>
INLINE void each(T* out, const T* x, int64_t count, Function function) {
  for (int64_t i = 0; i < count; ++i) out[i] = function(x[i]);
}

template <class T, class Function>
INLINE void pairs(T* out, const T* x, const T* y, int64_t count, Function function) {
  for (int64_t i = 0; i < count; ++i) out[i] = function(x[i], y[i]);
}

// 1 / (1 + exp(-x)) by the exp of a negative number, which never runs over.
template <class T>
INLINE void sigmoid(T* out, const T* x, int64_t count) {
  T powers[kBlock];
  for (int64_t i = 0; i < count; ++i) powers[i] = -std::fabs(x[i]);
  exp_nonpositive(powers, count, /*fast=*/false);
  for (int64_t i = 0; i < count; ++i) {
    const T above = x[i] != x[i] ? x[i] : T(1);
    out[i] = (x[i] < 0 ? powers[i] : above) / (T(1) + powers[i]);
  }
}

template <class T>
INLINE void floating_unary(int32_t opcode, T* out, const T* x, int64_t count) {
  switch (opcode) {
    case DITORCH_SQRT:
      return each(out, x, count, [](T v) { return std::sqrt(v); });
    case DITORCH_RSQRT:
      return each(out, x, count, [](T v) { return T(1) / std::sqrt(v); });
    case DITORCH_RECIPROCAL:
      return each(out, x, count, [](T v) { return T(1) / v; });
    case DITORCH_EXP:
      return exp(out, x, count);
    case DITORCH_LOG:
      return each(out, x, count, [](T v) { return std::log(v); });
    case DITORCH_SIN:
      return each(out, x, count, [](T v) { return std::sin(v); });
    case DITORCH_COS:
      return each(out, x, count, [](T v) { return std::cos(v); });
    case DITORCH_TANH:
      return each(out, x, count, [](T v) { return std::tanh(v); });
    case DITORCH_ERF:
      return erf(out, x, count);
    case DITORCH_SIGMOID:
      return sigmoid(out, x, count);
    case DITORCH_FLOOR:
      return each(out, x, count, [](T v) { return std::floor(v); });
    case DITORCH_TRUNCATE:
      return each(out, x, count, [](T v) { return std::trunc(v); });
    default:
      return;
  }
}

// The one quotient that has no room, of the lowest integer and -1, is that integer again.
INLINE int64_t floor_divided(int64_t a, int64_t b) {
  if (b == -1) return static_cast<int64_t>(0 - static_cast<uint64_t>(a));
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

INLINE void integer_loop(int32_t opcode, int64_t* out, const int64_t* x, const int64_t* y,
                         int64_t count) {
  switch (opcode) {
    case DITORCH_FLOOR_DIVIDE:
      return pairs(out, x, y, count, [](int64_t a, int64_t b) { return floor_divided(a, b); });
    case DITORCH_BIT_AND:
      return pairs(out, x, y, count, [](int64_t a, int64_t b) { return a & b; });
    case DITORCH_BIT_OR:
      return pairs(out, x, y, count, [](int64_t a, int64_t b) { return a | b; });
    case DITORCH_BIT_XOR:
      return pairs(out, x, y, count, [](int64_t a, int64_t b) { return a ^ b; });
    case DITORCH_SHIFT_LEFT:
      return pairs(out, x, y, count, [](int64_t a, int64_t b) { return a << b; });
    case DITORCH_SHIFT_RIGHT:
      return pairs(out, x, y, count, [](int64_t a, int64_t b) { return a >> b; });
    default:
      return;
  }
}

template <class T>
INLINE void binary_loop(int32_t opcode, T* out, const T* x, const T* y, int64_t count) {
  switch (opcode) {
    case DITORCH_ADD:
      return pairs(out, x, y, count, [](T a, T b) { return a + b; });
    case DITORCH_SUBTRACT:
      return pairs(out, x, y, count, [](T a, T b) { return a - b; });
    case DITORCH_MULTIPLY:
      return pairs(out, x, y, count, [](T a, T b) { return a * b; });
    case DITORCH_MINIMUM:
      return pairs(out, x, y, count, [](T a, T b) { return a != a || a < b ? a : b; });
    case DITORCH_MAXIMUM:
      return pairs(out, x, y, count, [](T a, T b) { return a != a || a > b ? a : b; });
    case DITORCH_LESS:
      return pairs(out, x, y, count, [](T a, T b) { return T(a < b); });
    case DITORCH_LESS_EQUAL:
      return pairs(out, x, y, count, [](T a, T b) { return T(a <= b); });
    case DITORCH_EQUAL:
      return pairs(out, x, y, count, [](T a, T b) { return T(a == b); });
    case DITORCH_AND:
      return pairs(out, x, y, count, [](T a, T b) { return T(a != T(0) && b != T(0)); });
    case DITORCH_OR:
      return pairs(out, x, y, count, [](T a, T b) { return T(a != T(0) || b != T(0)); });
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (opcode == DITORCH_DIVIDE) pairs(out, x, y, count, [](T a, T b) { return a / b; });
    if (opcode == DITORCH_POWER) pairs(out, x, y, count, [](T a, T b) { return std::pow(a, b); });
  } else {
    integer_loop(opcode, out, x, y, count);
  }
}

template <class T>
INLINE void unary_loop(int32_t opcode, T* out, const T* x, int64_t count) {
  switch (opcode) {
    case DITORCH_NEGATE:
      return each(out, x, count, [](T v) { return -v; });
    case DITORCH_ABS:
      return each(out, x, count, [](T v) { return std::abs(v); });
    case DITORCH_NOT:
      return each(out, x, count, [](T v) { return T(v == T(0)); });
    default:
      if constexpr (std::is_floating_point_v<T>) floating_unary(opcode, out, x, count);
  }
}

// Not templates, so that each is compiled for every generation of processor.
EMUCHIP_CLONES void binary(int32_t opcode, float* out, const float* x, const float* y,
                           int64_t count) {
  binary_loop(opcode, out, x, y, count);
}

EMUCHIP_CLONES void binary(int32_t opcode, double* out, const double* x, const double* y,
                           int64_t count) {
  binary_loop(opcode, out, x, y, count);
}

EMUCHIP_CLONES void unary(int32_t opcode, float* out, const float* x, int64_t count) {
  unary_loop(opcode, out, x, count);
}

EMUCHIP_CLONES void unary(int32_t opcode, double* out, const double* x, int64_t count) {
  unary_loop(opcode, out, x, count);
}

void unary(int32_t opcode, int64_t* out, const int64_t* x, int64_t count) {
  unary_loop(opcode, out, x, count);
}

void binary(int32_t opcode, int64_t* out, const int64_t* x, const int64_t* y, int64_t count) {
  binary_loop(opcode, out, x, y, count);
}

template <class T>
void select(T* out, const T* condition, const T* value, const T* otherwise, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = condition[i] != T(0) ? value[i] : otherwise[i];
}

EMUCHIP_CLONES void to_bfloat16s(Bfloat16* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bfloat16(values[i]);
}

EMUCHIP_CLONES void to_halves(Half* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_half(values[i]);
}

// Values an opcode takes off the stack; it puts one back, but for STORE.
int32_t values_taken(int32_t opcode, bool in_integers) {
  if (opcode == DITORCH_LOAD || opcode == DITORCH_CONSTANT || opcode == DITORCH_PLACE) return 0;
  if (opcode == DITORCH_RANDOM) return in_integers ? -1 : 0;
  if (opcode == DITORCH_STORE) return 1;
  const bool floating_only = (opcode >= DITORCH_SQRT && opcode <= DITORCH_TRUNCATE) ||
                             opcode == DITORCH_DIVIDE || opcode == DITORCH_POWER;
  if (floating_only && in_integers) return -1;
  if (opcode >= DITORCH_FLOOR_DIVIDE && opcode <= DITORCH_SHIFT_RIGHT) return in_integers ? 2 : -1;
  if (opcode >= DITORCH_NEGATE && opcode <= DITORCH_NOT) return 1;
  if (opcode >= DITORCH_ADD && opcode <= DITORCH_OR) return 2;
  return opcode == DITORCH_SELECT ? 3 : -1;
}

}  // namespace

bool is_storage(ditorch_dtype dtype) { return dtype >= DITORCH_FLOAT32 && dtype <= DITORCH_BOOL; }

bool is_runnable(ditorch_dtype compute, const ditorch_instruction* instructions, int32_t count,
                 int32_t operand_count) {
  const bool in_integers = compute == DITORCH_INT64;
  if (!in_integers && compute != DITORCH_FLOAT32 && compute != DITORCH_FLOAT64) return false;
  int32_t depth = 0;
  for (int32_t i = 0; i < count; ++i) {
    const auto& [opcode, operand, value, integer] = instructions[i];
    const int32_t taken = values_taken(opcode, in_integers);
    const bool has_operand = opcode == DITORCH_LOAD || opcode == DITORCH_STORE;
    if (taken < 0 || taken > depth) return false;
    if (has_operand && (operand < 0 || operand >= operand_count)) return false;
    depth += (opcode == DITORCH_STORE ? 0 : 1) - taken;
    if (depth > static_cast<int32_t>(DITORCH_MAP_STACK)) return false;
  }
  return depth == 0;
}

// The run's own memory where it already is what the stack holds, else null.
template <class T>
T* Program<T>::in_place(const Run& run, int64_t first) const {
  const bool same = (std::is_same_v<T, float> && run.dtype == DITORCH_FLOAT32) ||
                    (std::is_same_v<T, double> && run.dtype == DITORCH_FLOAT64) ||
                    (std::is_same_v<T, int64_t> && run.dtype == DITORCH_INT64);
  if (!same || run.stride != 1 || numerics_.flush_to_zero) return nullptr;
  return reinterpret_cast<T*>(run.data) + first;
}

template <class T>
void Program<T>::load(const Run& from, int64_t first, int64_t count, T* values) const {
  visit_any_storage(from.dtype, [&]<class S>(S*) {
    const S* elements = reinterpret_cast<const S*>(from.data) + first * from.stride;
    if (from.stride == 1) {
      for (int64_t i = 0; i < count; ++i) values[i] = loaded<T>(elements[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) values[i] = loaded<T>(elements[i * from.stride]);
    }
  });
  if constexpr (std::is_floating_point_v<T>) {
    if (numerics_.flush_to_zero && is_floating(from.dtype)) {
      flush_subnormals(values, count, from.dtype);
    }
  }
}

template <class T>
void Program<T>::store(const Run& to, int64_t first, int64_t count, const T* values) const {
  T flushed[kBlock];
  if constexpr (std::is_floating_point_v<T>) {
    if (numerics_.flush_to_zero && is_floating(to.dtype)) {
      std::copy_n(values, count, flushed);
      flush_subnormals(flushed, count, to.dtype);
      values = flushed;
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    const int64_t at = first * to.stride;
    if (to.stride == 1 && to.dtype == DITORCH_BFLOAT16) {
      return to_bfloat16s(reinterpret_cast<Bfloat16*>(to.data) + at, values, count);
    }
    if (to.stride == 1 && to.dtype == DITORCH_FLOAT16) {
      return to_halves(reinterpret_cast<Half*>(to.data) + at, values, count);
    }
  }
  visit_any_storage(to.dtype, [&]<class S>(S*) {
    S* elements = reinterpret_cast<S*>(to.data) + first * to.stride;
    if (to.stride == 1) {
      for (int64_t i = 0; i < count; ++i) elements[i] = stored<S>(values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) elements[i * to.stride] = stored<S>(values[i]);
    }
  });
}

template <class T>
void Program<T>::block(const Run* operands, int64_t first, int64_t count, int64_t number) const {
  thread_local T buffers[DITORCH_MAP_STACK][kBlock];
  const T* stack[DITORCH_MAP_STACK];  // each in its buffer, or in an operand's memory
  int32_t depth = 0;
  for (int32_t step = 0; step < count_; ++step) {
    const auto& [opcode, operand, value, integer] = instructions_[step];
    if (opcode == DITORCH_STORE) {
      --depth;
      T* memory = in_place(operands[operand], first);
      if (!memory) {
        store(operands[operand], first, count, stack[depth]);
      } else if (memory != stack[depth]) {
        std::copy_n(stack[depth], count, memory);
      }
      continue;
    }
    if (opcode == DITORCH_LOAD) {
      const T* memory = in_place(operands[operand], first);
      if (!memory) load(operands[operand], first, count, buffers[depth]);
      stack[depth] = memory ? memory : buffers[depth];
      ++depth;
      continue;
    }
    if (opcode == DITORCH_CONSTANT) {
      const T constant = std::is_integral_v<T> ? static_cast<T>(integer) : static_cast<T>(value);
      std::fill_n(buffers[depth], count, constant);
      stack[depth] = buffers[depth];
      ++depth;
      continue;
    }
    if (opcode == DITORCH_PLACE) {
      for (int64_t i = 0; i < count; ++i) buffers[depth][i] = static_cast<T>(first + i);
      stack[depth] = buffers[depth];
      ++depth;
      continue;
    }
    if (opcode == DITORCH_RANDOM) {
      if constexpr (std::is_floating_point_v<T>) {
        random_numbers(static_cast<uint64_t>(integer), number, buffers[depth], count);
      }
      stack[depth] = buffers[depth];
      ++depth;
      continue;
    }
    depth -= values_taken(opcode, std::is_integral_v<T>) - 1;
    const T** top = stack + depth - 1;
    // The last step writes straight to where the result is kept.
    const bool last = step + 2 == count_;
    T* kept = last ? in_place(operands[instructions_[step + 1].operand], first) : nullptr;
    T* out = kept ? kept : buffers[depth - 1];
    if (opcode == DITORCH_SELECT) {
      select(out, top[0], top[1], top[2], count);
    } else if (opcode >= DITORCH_ADD) {
      binary(opcode, out, top[0], top[1], count);
    } else {
      unary(opcode, out, top[0], count);
    }
    top[0] = out;
  }
}

template <class T>
void Program<T>::operator()(const Run* operands, int64_t elements, int64_t number) const {
  for (int64_t first = 0; first < elements; first += kBlock) {
    block(operands, first, std::min(kBlock, elements - first), number + first);
  }
}

template class Program<float>;
template class Program<double>;
template class Program<int64_t>;

}  // namespace emuchip
