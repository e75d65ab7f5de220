#include "elements.h"

#include <math.h>
#include <string.h>

int64_t bytes_of(ditorch_dtype dtype) {
  switch (dtype) {
    case DITORCH_FLOAT64:
    case DITORCH_INT64:
      return 8;
    case DITORCH_FLOAT32:
    case DITORCH_INT32:
      return 4;
    case DITORCH_FLOAT16:
    case DITORCH_BFLOAT16:
    case DITORCH_INT16:
      return 2;
    default:
      return 1;
  }
}

int is_floating(ditorch_dtype dtype) { return dtype <= DITORCH_BFLOAT16; }

int is_known(ditorch_dtype dtype) { return dtype <= DITORCH_BOOL; }

/* The value with so many bits of precision, ties to even; numbers below 2^lowest are subnormal. */
static double round_to(double value, int bits, int lowest) {
  if (value == 0 || !isfinite(value)) return value;
  int exponent; /* of a fraction from 1/2 to 1 */
  frexp(value, &exponent);
  if (exponent < lowest + 1) exponent = lowest + 1;
  return ldexp(nearbyint(ldexp(value, bits - exponent)), exponent - bits);
}

static float bfloat16_number(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t bfloat16_bits(double value) {
  if (isnan(value)) return 0x7fc0;
  const float rounded = (float)round_to(value, 8, -126);
  uint32_t wide;
  memcpy(&wide, &rounded, sizeof wide);
  return (uint16_t)(wide >> 16);
}

static double float16_number(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

static uint16_t float16_bits(double value) {
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  if (isnan(value)) return 0x7e00;
  const double rounded = fabs(round_to(value, 11, -14));
  if (rounded >= 65536) return sign | 0x7c00;
  if (rounded < ldexp(1, -14)) return sign | (uint16_t)ldexp(rounded, 24);
  int exponent;
  const double fraction = frexp(rounded, &exponent); /* 11 bits behind the point, the first is 1 */
  return sign | (uint16_t)((exponent + 14) << 10 | ((int)ldexp(fraction, 11) & 1023));
}

double read_number(const void* from, ditorch_dtype dtype, int64_t i) {
  switch (dtype) {
    case DITORCH_FLOAT32:
      return ((const float*)from)[i];
    case DITORCH_FLOAT64:
      return ((const double*)from)[i];
    case DITORCH_FLOAT16:
      return float16_number(((const uint16_t*)from)[i]);
    case DITORCH_BFLOAT16:
      return bfloat16_number(((const uint16_t*)from)[i]);
    default:
      return (double)read_integer(from, dtype, i);
  }
}

int64_t read_integer(const void* from, ditorch_dtype dtype, int64_t i) {
  switch (dtype) {
    case DITORCH_INT8:
      return ((const int8_t*)from)[i];
    case DITORCH_INT16:
      return ((const int16_t*)from)[i];
    case DITORCH_INT32:
      return ((const int32_t*)from)[i];
    case DITORCH_INT64:
      return ((const int64_t*)from)[i];
    case DITORCH_BOOL:
      return ((const uint8_t*)from)[i] != 0;
    default:
      return ((const uint8_t*)from)[i];
  }
}

/* What no integer of 64 bits is becomes the lowest one. */
static int64_t integer_of(double value) {
  return value >= -0x1p63 && value < 0x1p63 ? (int64_t)value : INT64_MIN;
}

void write_number(void* to, ditorch_dtype dtype, int64_t i, double value) {
  switch (dtype) {
    case DITORCH_FLOAT32:
      ((float*)to)[i] = (float)value;
      return;
    case DITORCH_FLOAT64:
      ((double*)to)[i] = value;
      return;
    case DITORCH_FLOAT16:
      ((uint16_t*)to)[i] = float16_bits(value);
      return;
    case DITORCH_BFLOAT16:
      ((uint16_t*)to)[i] = bfloat16_bits(value);
      return;
    case DITORCH_BOOL:
      ((uint8_t*)to)[i] = value != 0;
      return;
    default:
      write_integer(to, dtype, i, integer_of(value));
  }
}

void write_integer(void* to, ditorch_dtype dtype, int64_t i, int64_t value) {
  if (is_floating(dtype)) {
    write_number(to, dtype, i, (double)value);
    return;
  }
  switch (dtype) {
    case DITORCH_INT16:
      ((int16_t*)to)[i] = (int16_t)value;
      return;
    case DITORCH_INT32:
      ((int32_t*)to)[i] = (int32_t)value;
      return;
    case DITORCH_INT64:
      ((int64_t*)to)[i] = value;
      return;
    case DITORCH_BOOL:
      ((uint8_t*)to)[i] = value != 0;
      return;
    default:
      ((uint8_t*)to)[i] = (uint8_t)value; /* INT8, too: the bits are the same */
  }
}

int next_place(place* at) {
  for (int32_t d = at->dimensions - 1; d >= 0; --d) {
    if (++at->index[d] < at->sizes[d]) return 1;
    at->index[d] = 0;
  }
  return 0;
}

int64_t offset_of(const place* at, const int64_t* strides) {
  int64_t offset = 0;
  for (int32_t d = 0; d < at->dimensions; ++d) offset += at->index[d] * strides[d];
  return offset;
}
