// Partial results: sums of some ranks' vectors on their way to becoming those of all. 16-bit floats
// are kept as float32 until the end, so that they are rounded once.
#pragma once

#include <cstring>

#include "collective/reduction.h"
#include "collective/scratch.h"

namespace dicomm {

// How partial results are combined.
struct Combine {
  DataType type;
  ReduceOp op;
  std::size_t element_bytes;

  Combine(DataType element, ReduceOp wanted)
      : type(accumulator(element)),
        op(wanted == ReduceOp::avg ? ReduceOp::sum : wanted),
        element_bytes(dicomm::element_bytes(type)) {}

  // into = lower op upper; may be either. Which is lower is part of the algorithm: both sides of
  // an exchange must get equal bits.
  void operator()(const void* lower, const void* upper, void* into, std::size_t count) const {
    const void* sources[] = {lower, upper};
    reduce(sources, into, count, type, op);
  }
};

// Runs an algorithm on this rank's vector as a partial result, in place where the types allow, and
// turns what it leaves there into the result. output null: this rank keeps nothing.
// algorithm: (std::byte* partials, const Combine&) -> done_at_ns, done with its buffers.
template <class Algorithm>
std::int64_t on_partials(const void* input, void* output, std::size_t count, DataType type,
                         ReduceOp op, int ranks, Algorithm&& algorithm) {
  const Combine combine(type, op);
  const int divisor = op == ReduceOp::avg ? ranks : 1;
  if (output && combine.type == type) {
    if (count > 0 && output != input) std::memmove(output, input, count * combine.element_bytes);
    const std::int64_t done = algorithm(static_cast<std::byte*>(output), combine);
    if (divisor > 1) narrow(output, output, count, type, divisor);
    return done;
  }
  Scratch scratch(count * combine.element_bytes);
  widen(input, scratch.data(), count, type);
  const std::int64_t done = algorithm(scratch.data(), combine);
  if (output) narrow(scratch.data(), output, count, type, divisor);
  return done;
}

}  // namespace dicomm
