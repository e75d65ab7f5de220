// Element types and the arithmetic that combines elements of several ranks.
#pragma once

#include <cstddef>
#include <span>

namespace dicomm {

enum class DataType {
  float32,
  float64,
  float16,   // reduced in float32, rounded once
  bfloat16,  // reduced in float32, rounded once
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean,  // sum and max: or; product and min: and
};

// avg divides the sum by the number of ranks, floating-point types only; band, bor and bxor take
// integers and booleans only. Integer sums and products wrap around. min and max keep NaN.
enum class ReduceOp { sum, avg, min, max, product, band, bor, bxor };

std::size_t element_bytes(DataType type);

// The type in which partial results of `type` are kept: float32 for the 16-bit floats.
DataType accumulator(DataType type);

// Throws Error where the type has no such reduction.
void check_reduction(DataType type, ReduceOp op);

// out[i] = sources[0][i] op sources[1][i] op ..., always in this order, so that equal inputs give
// equal bits on every rank. `out` may be one of the sources. avg divides by sources.size().
void reduce(std::span<const void* const> sources, void* out, std::size_t count, DataType type,
            ReduceOp op);
// The same, with floats divided by `divisor` before they are rounded; op is not avg.
void reduce_divided(std::span<const void* const> sources, void* out, std::size_t count,
                    DataType type, ReduceOp op, int divisor);

// Partial results: widen `type` to accumulator(type); narrow back, dividing by `divisor`.
void widen(const void* in, void* out, std::size_t count, DataType type);
void narrow(const void* in, void* out, std::size_t count, DataType type, int divisor);

}  // namespace dicomm
