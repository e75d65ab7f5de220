// Formulas of elementwise operators, in postfix order, over the arguments of an ATen operator.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <vector>

#include "abi/operators.h"
#include "ops/map.h"

namespace ditorch {

// One step: an opcode, an argument of the operator or a constant.
struct Step {
  enum Kind { opcode, argument, option, condition, constant } kind;
  int32_t index = 0;  // of the opcode or the argument
  double value = 0;   // of the constant

  Step(ditorch_opcode opcode) : kind(Step::opcode), index(opcode) {}
  Step(double value) : kind(constant), value(value) {}
  Step(Kind kind, int32_t index) : kind(kind), index(index) {}
};

using Formula = std::vector<Step>;

// An argument whose dtype takes part in what the operator computes in.
inline Step argument(int32_t index) { return {Step::argument, index}; }

// One whose dtype does not: a factor beside the tensors, a value to fill in.
inline Step option(int32_t index) { return {Step::option, index}; }

// Truth values that choose; their dtype does not take part either.
inline Step condition(int32_t index) { return {Step::condition, index}; }

Formula operator+(Formula left, const Formula& right);

// first + weight * (end - first), from the nearer end as torch has it.
Formula lerp_formula(const Step& first, const Step& end, double weight);

// The dtype a program computes in, given the one its arguments promote to: true division and its
// like take integers to `result`, a floating dtype. Nothing if no program computes in it.
std::optional<ditorch_dtype> compute_dtype(const Formula& formula, c10::ScalarType common,
                                           c10::ScalarType result);

// The dtype that torch converts the arguments of a formula to before it compares them; nothing if
// it compares nothing.
std::optional<c10::ScalarType> compared_dtype(const Formula& formula, c10::ScalarType common);

// A Python number, or a 0-dimensional tensor of the host.
std::optional<c10::Scalar> number(const c10::IValue& value);

// Whether a program may take in a tensor of the dtype `dtype` for the step of a formula whose
// result has the dtype `result`: not if torch would round its elements before it compares them, and
// not if a fraction would count as zero among truth values.
bool takes_tensor(const Step& step, c10::ScalarType dtype, std::optional<c10::ScalarType> compared,
                  c10::ScalarType result);

// The number as it stands in a formula whose result has the dtype `result`: one that is compared is
// rounded first. Nothing if a dtype cannot hold it; torch then refuses some operators and lets
// others wrap around, as the host does.
std::optional<c10::Scalar> number_in_formula(const Step& step, const c10::Scalar& scalar,
                                             std::optional<c10::ScalarType> compared,
                                             c10::ScalarType result);

// False if a program of that dtype cannot have the number.
bool add_constant(Program& program, const c10::Scalar& scalar, ditorch_dtype compute);

}  // namespace ditorch
