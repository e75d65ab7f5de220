// The steps of elementwise programs, each over a run of elements.
#pragma once

#include <cstdint>

namespace emuchip {

// Values an opcode takes off the stack; it puts one back, but for STORE. -1: there is no such step.
int32_t values_taken(int32_t opcode, bool in_integers);

// What is computed may lie where one of the arguments lies.
void unary(int32_t opcode, float* out, const float* x, int64_t count);
void unary(int32_t opcode, double* out, const double* x, int64_t count);
void unary(int32_t opcode, int64_t* out, const int64_t* x, int64_t count);

void binary(int32_t opcode, float* out, const float* x, const float* y, int64_t count);
void binary(int32_t opcode, double* out, const double* x, const double* y, int64_t count);
void binary(int32_t opcode, int64_t* out, const int64_t* x, const int64_t* y, int64_t count);

void select(float* out, const float* condition, const float* value, const float* otherwise,
            int64_t count);
void select(double* out, const double* condition, const double* value, const double* otherwise,
            int64_t count);
void select(int64_t* out, const int64_t* condition, const int64_t* value, const int64_t* otherwise,
            int64_t count);

}  // namespace emuchip
