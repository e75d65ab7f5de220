// Elements of any floating dtype, read and written as float or double.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "runtime.h"

namespace emuchip {

struct Half {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

template <class T>
T from_storage(float value) {
  return value;
}

template <class T>
T from_storage(double value) {
  return static_cast<T>(value);
}

template <class T>
T from_storage(Bfloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
T from_storage(Half value) {
  // The exponent moves by 112 with a multiplication, which also makes subnormals right.
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const bool special = (value.bits & 0x7c00u) == 0x7c00u;  // infinity or NaN
  const uint32_t bits = special ? magnitude | 0x7f800000u : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(bits | static_cast<uint32_t>(value.bits & 0x8000u) << 16);
}

template <class S>
S to_storage(double value) {
  return static_cast<S>(value);
}

inline Bfloat16 to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // nearest, ties to even
  return {static_cast<uint16_t>(value == value ? rounded : (bits >> 16 | 0x40u))};
}

inline Half to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (value != value) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x1p-14f) {
    // Adding 0.5 lets the adder round at a subnormal's last place, 2^-24.
    const uint32_t shifted = std::bit_cast<uint32_t>(magnitude + 0.5f);
    return {static_cast<uint16_t>(sign | (shifted - std::bit_cast<uint32_t>(0.5f)))};
  }
  const uint32_t low = bits & 0x7fffffffu;
  const uint32_t rounded = (low + 0xfffu + (low >> 13 & 1u)) >> 13;  // nearest, ties to even
  return {static_cast<uint16_t>(sign | (rounded - (112u << 10)))};
}

template <>
inline Bfloat16 to_storage<Bfloat16>(double value) {
  return to_bfloat16(static_cast<float>(value));
}

template <>
inline Half to_storage<Half>(double value) {
  return to_half(static_cast<float>(value));
}

// Calls visit with a null pointer to the dtype's storage type.
template <class Visit>
void visit_storage(ditorch_dtype dtype, Visit visit) {
  switch (dtype) {
    case DITORCH_FLOAT64:
      return visit(static_cast<double*>(nullptr));
    case DITORCH_FLOAT16:
      return visit(static_cast<Half*>(nullptr));
    case DITORCH_BFLOAT16:
      return visit(static_cast<Bfloat16*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

// Calls visit with a null pointer to the storage type of any dtype, floating or not.
template <class Visit>
void visit_any_storage(ditorch_dtype dtype, Visit visit) {
  switch (dtype) {
    case DITORCH_INT8:
      return visit(static_cast<int8_t*>(nullptr));
    case DITORCH_INT16:
      return visit(static_cast<int16_t*>(nullptr));
    case DITORCH_INT32:
      return visit(static_cast<int32_t*>(nullptr));
    case DITORCH_INT64:
      return visit(static_cast<int64_t*>(nullptr));
    case DITORCH_UINT8:
      return visit(static_cast<uint8_t*>(nullptr));
    case DITORCH_BOOL:
      return visit(static_cast<bool*>(nullptr));
    default:
      return visit_storage(dtype, visit);
  }
}

inline bool is_floating(ditorch_dtype dtype) {
  return dtype == DITORCH_FLOAT32 || dtype == DITORCH_FLOAT64 || dtype == DITORCH_FLOAT16 ||
         dtype == DITORCH_BFLOAT16;
}

inline int64_t element_bytes(ditorch_dtype dtype) {
  return dtype == DITORCH_FLOAT64 ? 8 : dtype == DITORCH_FLOAT32 ? 4 : 2;
}

// Of any dtype that programs store.
inline int64_t bytes_of(ditorch_dtype dtype) {
  switch (dtype) {
    case DITORCH_INT8:
    case DITORCH_UINT8:
    case DITORCH_BOOL:
      return 1;
    case DITORCH_INT16:
      return 2;
    case DITORCH_INT32:
      return 4;
    case DITORCH_INT64:
      return 8;
    default:
      return element_bytes(dtype);
  }
}

// Makes subnormal numbers of the dtype zero. float16 keeps them: its range is too small to lose.
template <class T>
void flush_subnormals(T* values, int64_t count, ditorch_dtype dtype) {
  if (dtype == DITORCH_FLOAT16) return;
  const T smallest = static_cast<T>(dtype == DITORCH_FLOAT64 ? DBL_MIN : FLT_MIN);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = std::fabs(values[i]) < smallest ? T(0) : values[i];
  }
}

}  // namespace emuchip
