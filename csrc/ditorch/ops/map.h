// Elementwise programs of the operator ABI, put together from tensors and steps.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/SmallVector.h>

#include "runtime/vendor.h"

namespace ditorch {

// The dtype in which a program on values of `common` computes; nothing for complex numbers.
std::optional<ditorch_dtype> compute_dtype_of(c10::ScalarType common);

// Whether no two elements share memory, as far as strides tell at once; gaps do no harm.
bool has_elements_apart(const at::Tensor& tensor);

// The instructions of a program.
class Program {
 public:
  void load(int32_t operand) { steps_.push_back({DITORCH_LOAD, operand, 0, 0}); }
  void store(int32_t operand) { steps_.push_back({DITORCH_STORE, operand, 0, 0}); }
  void constant(double value, int64_t integer) {
    steps_.push_back({DITORCH_CONSTANT, 0, value, integer});
  }
  void random(int64_t key) { steps_.push_back({DITORCH_RANDOM, 0, 0, key}); }
  void step(ditorch_opcode opcode) { steps_.push_back({opcode, 0, 0, 0}); }

  const ditorch_instruction* data() const { return steps_.data(); }
  int32_t size() const { return static_cast<int32_t>(steps_.size()); }

 private:
  c10::SmallVector<ditorch_instruction, 16> steps_;
};

// Whether the chip at hand runs a program that leaves one float32 on the stack: asked with one
// element, as only the call can tell.
bool vendor_runs(Program program);

// Whether it computes elementwise programs at all. Where it does not, structured operators go to
// the host in one piece.
bool vendor_has_map();

// The operands of a program over tensors that broadcast to the shape of what is written.
class Operands {
 public:
  explicit Operands(const at::Tensor& written);

  // The operand of a tensor, which is taken in once; -1 if a program cannot have it: another chip,
  // a shape that does not broadcast, memory that overlaps what is written in part, too many.
  int32_t add(const at::Tensor& tensor);

  // The operand that is written: the last, once the others are there.
  int32_t add_written();

  ditorch_status run(const ditorch_context& context, ditorch_dtype compute, const Program& program);

 private:
  using Strides = c10::SmallVector<int64_t, 6>;

  void merge_dimensions();

  const at::Tensor& written_;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
  c10::SmallVector<Strides, 8> strides_;
  Strides sizes_;
};

// destination = source, converted and spread; they have the same shape and lie on one chip.
ditorch_status map_copy(const ditorch_context& context, const at::Tensor& destination,
                        const at::Tensor& source);

}  // namespace ditorch
