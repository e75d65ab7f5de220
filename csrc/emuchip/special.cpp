#include "special.h"

#include <bit>
#include <cmath>

#include "isa.h"

namespace emuchip {
namespace {

// x = exponent * ln(2) + rest with |rest| <= ln(2)/2, so that exp(x) = 2^exponent * exp(rest).
struct Reduced {
  int32_t exponent;
  float rest;
};

inline Reduced reduced(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // few bits, so that n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float rest = (x - n * kLn2High) - n * kLn2Low;
  return {std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound), rest};
}

inline float power_of_two(int32_t exponent) { return std::bit_cast<float>((exponent + 127) << 23); }

// exp(x) of at most 0, where exp(rest) is a polynomial.
template <class Polynomial>
inline float exp_reduced(float x, Polynomial exp_of_rest) {
  constexpr float kSmallest = -87.33654f;  // below, the result would be subnormal
  const Reduced parts = reduced(x < kSmallest ? kSmallest : x);
  const float result = exp_of_rest(parts.rest) * power_of_two(parts.exponent);
  return x < kSmallest ? 0.0f : result;
}

// exp(r) for |r| <= ln(2)/2.
inline float exp_of_rest(float r) {
  const float tail =
      ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) *
           r +
       1.6666665459e-1f) *
          r +
      5.0000001201e-1f;
  return tail * (r * r) + r + 1.0f;
}

inline float exp_exact(float x) { return exp_reduced(x, exp_of_rest); }

// Least maximum of the relative error, 2.6e-6, for degree 4.
inline float exp_fast(float x) {
  return exp_reduced(x, [](float r) {
    return (((0.0414586089f * r + 0.167909081f) * r + 0.500043587f) * r + 0.999963404f) * r +
           0.999999261f;
  });
}

// Of any argument: the power of two in two factors, of which each has room, however large or small
// the result is.
inline float exp_anywhere(float x) {
  constexpr float kSmallest = -104.0f, kLargest = 89.0f;  // beyond, it is 0 and infinity
  const float above = x < kSmallest ? kSmallest : x;
  const Reduced parts = reduced(above > kLargest ? kLargest : above);
  const int32_t half = parts.exponent >> 1;
  return exp_of_rest(parts.rest) * power_of_two(half) * power_of_two(parts.exponent - half);
}

template <size_t count>
inline float polynomial(const float (&coefficients)[count], float x) {
  float sum = coefficients[count - 1];
  for (size_t i = count - 1; i-- > 0;) sum = sum * x + coefficients[i];
  return sum;
}

// 2^x for x from -120 to 120, 2e-7 off: what it is taken from is larger.
inline float exp2_within(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kRest[] = {1.0f,
                             0.6931471824645996f,
                             0.2402234971523285f,
                             0.055503811687231064f,
                             0.00966636836528778f,
                             0.0013381302123889327f};
  const float shifted = x + kRound;
  const float power = polynomial(kRest, x - (shifted - kRound));
  return std::bit_cast<float>(std::bit_cast<int32_t>(power) +
                              (std::bit_cast<int32_t>(shifted) << 23));
}

// Both polynomials have the least maximum of the relative error: of erf(x) / x - 1 in x^2 up to 1,
// and of log2(1 - erf(x)) in x from 1 to 4, beyond which erf(x) is 1 in float32.
inline float erf_anywhere(float x) {
  constexpr float kNear[] = {0.12837916612625122f,   -0.3761262595653534f,  0.11283600330352783f,
                             -0.026854444295167923f, 0.005189535208046436f, -0.0008020841050893068f,
                             7.889119297033176e-05f};
  constexpr float kFar[] = {
      0.0002947829489130527f, -1.629756212234497f,     -0.9132835865020752f,
      -0.15673227608203888f,  0.036605801433324814f,   -0.006177931092679501f,
      0.0006690333248116076f, -3.650967846624553e-05f, 3.617359141117049e-07f};
  const float size = std::fabs(x);
  const float near = x + x * polynomial(kNear, x * x);
  const float clamped = size > 4.0f ? 4.0f : size;
  const float far = std::copysign(1.0f - exp2_within(polynomial(kFar, clamped)), x);
  return size >= 1.0f ? far : near;
}

// Near 0 Cephes' polynomial (tanhf), in x^2.
inline float tanh_anywhere(float x) {
  constexpr float kNear[] = {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f,
                             2.06390887954e-2f, -5.70498872745e-3f};
  const float size = std::fabs(x), square = x * x;
  const float near = x + x * (square * polynomial(kNear, square));
  const float far = 1.0f - 2.0f / (exp_anywhere(2.0f * size) + 1.0f);
  return std::copysign(size >= 0.625f ? far : near, x);  // of -0, too
}

// By the exp of a negative number, which never runs over.
template <class T>
inline T sigmoid_of(T x, T power) {
  const T above = x != x ? x : T(1);
  return (x < 0 ? power : above) / (T(1) + power);
}

EMUCHIP_CLONES void exp_anywhere_all(float* out, const float* values, int64_t count) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) out[i] = exp_anywhere(values[i]);
}

EMUCHIP_CLONES void erf_anywhere_all(float* out, const float* values, int64_t count) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) out[i] = erf_anywhere(values[i]);
}

EMUCHIP_CLONES void tanh_anywhere_all(float* out, const float* values, int64_t count) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) out[i] = tanh_anywhere(values[i]);
}

EMUCHIP_CLONES void sigmoid_all(float* out, const float* values, int64_t count) {
  EMUCHIP_IN_PLACE
  for (int64_t i = 0; i < count; ++i) {
    out[i] = sigmoid_of(values[i], exp_exact(-std::fabs(values[i])));
  }
}

EMUCHIP_CLONES void exp_exact_all(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = exp_exact(values[i]);
}

EMUCHIP_CLONES void exp_fast_all(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = exp_fast(values[i]);
}

float rsqrt_fast(float value) {
  if (!std::isnormal(value) || value < 0) return 1.0f / std::sqrt(value);
  // A guess from the exponent, then two of Newton's steps.
  float guess = std::bit_cast<float>(0x5f3759dfu - (std::bit_cast<uint32_t>(value) >> 1));
  for (int step = 0; step < 2; ++step) guess *= 1.5f - 0.5f * value * guess * guess;
  return guess;
}

}  // namespace

bool is_fast(const Numerics& numerics, ditorch_dtype dtype) {
  return numerics.fast_exp && dtype != DITORCH_FLOAT64;
}

void exp_nonpositive(float* values, int64_t count, bool fast) {
  fast ? exp_fast_all(values, count) : exp_exact_all(values, count);
}

void exp_nonpositive(double* values, int64_t count, bool fast) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = fast ? exp_fast(static_cast<float>(values[i])) : std::exp(values[i]);
  }
}

void exp(float* out, const float* values, int64_t count) { exp_anywhere_all(out, values, count); }

void exp(double* out, const double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::exp(values[i]);
}

void erf(float* out, const float* values, int64_t count) { erf_anywhere_all(out, values, count); }

void erf(double* out, const double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::erf(values[i]);
}

void tanh(float* out, const float* values, int64_t count) { tanh_anywhere_all(out, values, count); }

void tanh(double* out, const double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::tanh(values[i]);
}

void sigmoid(float* out, const float* values, int64_t count) { sigmoid_all(out, values, count); }

void sigmoid(double* out, const double* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = sigmoid_of(values[i], std::exp(-std::fabs(values[i])));
  }
}

float rsqrt(float value, bool fast) { return fast ? rsqrt_fast(value) : 1.0f / std::sqrt(value); }

double rsqrt(double value, bool fast) {
  return fast ? rsqrt_fast(static_cast<float>(value)) : 1.0 / std::sqrt(value);
}

}  // namespace emuchip
