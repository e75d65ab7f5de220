// The chip's special-function unit: exp, erf, tanh, sigmoid and rsqrt, exact to the last bit or
// two, or fast.
#pragma once

#include <cstdint>

#include "chip_file.h"

namespace emuchip {

// Fast units serve every dtype but float64.
bool is_fast(const Numerics& numerics, ditorch_dtype dtype);

// values[i] = exp(values[i]) for values of at most 0, as softmax needs. Fast: about 3e-6 off.
void exp_nonpositive(float* values, int64_t count, bool fast);
void exp_nonpositive(double* values, int64_t count, bool fast);

// out[i] = exp(values[i]) and so on for any values; out may be the values.
void exp(float* out, const float* values, int64_t count);
void exp(double* out, const double* values, int64_t count);
void erf(float* out, const float* values, int64_t count);
void erf(double* out, const double* values, int64_t count);
void tanh(float* out, const float* values, int64_t count);
void tanh(double* out, const double* values, int64_t count);
void sigmoid(float* out, const float* values, int64_t count);
void sigmoid(double* out, const double* values, int64_t count);

// 1 / sqrt(value) for values above 0. Fast: about 5e-6 off.
float rsqrt(float value, bool fast);
double rsqrt(double value, bool fast);

}  // namespace emuchip
