// An elementwise program, run over short runs of elements: each step is one loop over the run.
#pragma once

#include "chip_file.h"
#include "operators.h"

namespace emuchip {

// Where an operand's elements of a run lie.
struct Run {
  char* data;
  ditorch_dtype dtype;
  int64_t stride;  // in elements
};

// T is what the stack holds: float, double or int64_t.
template <class T>
class Program {
 public:
  Program(const ditorch_instruction* instructions, int32_t count, const Numerics& numerics)
      : instructions_(instructions), count_(count), numerics_(numerics) {}

  // Runs the program over `elements` elements of each operand. `number` is that of the first of
  // them in the whole walk.
  void operator()(const Run* operands, int64_t elements, int64_t number) const;

 private:
  void block(const Run* operands, int64_t first, int64_t count, int64_t number) const;
  void load(const Run& from, int64_t first, int64_t count, T* values) const;
  void store(const Run& to, int64_t first, int64_t count, const T* values) const;
  T* in_place(const Run& run, int64_t first) const;

  const ditorch_instruction* instructions_;
  int32_t count_;
  const Numerics& numerics_;
};

extern template class Program<float>;
extern template class Program<double>;
extern template class Program<int64_t>;

// Whether programs read and write it.
bool is_storage(ditorch_dtype dtype);

// Whether this chip runs the program: known steps, operands in range, a stack that never runs over
// or empty.
bool is_runnable(ditorch_dtype compute, const ditorch_instruction* instructions, int32_t count,
                 int32_t operand_count);

// Calls run with a T{} of the type that holds `compute`.
template <class Call>
void with_stack_type(ditorch_dtype compute, Call call) {
  switch (compute) {
    case DITORCH_FLOAT64:
      return call(double{});
    case DITORCH_INT64:
      return call(int64_t{});
    default:
      return call(float{});
  }
}

}  // namespace emuchip
