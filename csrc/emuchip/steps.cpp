// The loops of a program's steps, one each.
#include "steps.h"

#include <cmath>
#include <type_traits>

#include "isa.h"
#include "operators.h"
#include "special.h"

namespace emuchip {
namespace {

#define INLINE [[gnu::always_inline]] inline

template <class T, class Function>
INLINE void each(T* out, const T* x, int64_t count, Function function) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) out[i] = function(x[i]);
}

template <class T, class Function>
INLINE void pairs(T* out, const T* x, const T* y, int64_t count, Function function) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) out[i] = function(x[i], y[i]);
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
      return tanh(out, x, count);
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

template <class T>
INLINE void select_loop(T* out, const T* condition, const T* value, const T* otherwise,
                        int64_t count) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) out[i] = condition[i] != T(0) ? value[i] : otherwise[i];
}

}  // namespace

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

EMUCHIP_CLONES void select(float* out, const float* condition, const float* value,
                           const float* otherwise, int64_t count) {
  select_loop(out, condition, value, otherwise, count);
}

EMUCHIP_CLONES void select(double* out, const double* condition, const double* value,
                           const double* otherwise, int64_t count) {
  select_loop(out, condition, value, otherwise, count);
}

void select(int64_t* out, const int64_t* condition, const int64_t* value, const int64_t* otherwise,
            int64_t count) {
  select_loop(out, condition, value, otherwise, count);
}

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

}  // namespace emuchip
