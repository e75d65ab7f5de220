// An elementwise program, run over blocks of elements that stay in the first cache: each step is
// one loop over the block.
#pragma once

#include <cstddef>

#include "chip_file.h"
#include "operators.h"

namespace emuchip {

// Where an operand's elements of a rectangle lie: rows of columns. Strides in elements.
struct Rectangle {
  char* data;
  ditorch_dtype dtype;
  int64_t row_stride, stride;
};

// T is what a value has: float, double or int64_t.
template <class T>
class Program {
 public:
  Program(const ditorch_instruction* instructions, int32_t count, const Numerics& numerics);

  // Runs the program over so many rows and columns of each operand. `number` is that of the first
  // element in the whole walk.
  void operator()(const Rectangle* operands, int64_t rows, int64_t columns, int64_t number) const;

 private:
  // A step gives one value, which later steps name by the step's place; STORE gives none.
  struct Step {
    int32_t opcode, operand;
    int32_t taken[3];  // steps; -1 beyond the last
    int32_t buffer;    // where the value is kept
    T constant;
    uint64_t key;  // of RANDOM

    bool operator==(const Step& other) const;
  };

  // Some of the elements: whole rows, or a part of one.
  struct Block {
    int64_t rows, columns;
    int64_t place;   // of the first element in its row
    int64_t number;  // and in the whole walk

    int64_t elements() const { return rows * columns; }
  };

  int32_t step_of(const Step& step);
  void place_values();
  void fill_constants(int64_t count) const;
  void run(const Rectangle* operands, const Block& block) const;
  void compute(const Step& step, const Block& block, const T* const* values, T* out) const;
  void load(const Rectangle& from, const Block& block, T* values) const;
  void store(const Rectangle& to, const Block& block, const T* values) const;
  T* in_place(const Rectangle& operand, const Block& block) const;
  T* buffer(int32_t number) const;

  Step steps_[DITORCH_MAP_INSTRUCTIONS];
  int32_t count_ = 0;
  int32_t after_store_ = 0;     // the step behind the last STORE
  int64_t block_elements_ = 0;  // that a buffer has
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
