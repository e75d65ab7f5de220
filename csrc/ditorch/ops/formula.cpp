#include "ops/formula.h"

#include <ATen/core/Tensor.h>

#include <cmath>

namespace ditorch {
namespace {

bool is_floating_only(int32_t opcode) {
  return (opcode >= DITORCH_SQRT && opcode <= DITORCH_SIGMOID) || opcode == DITORCH_DIVIDE ||
         opcode == DITORCH_POWER;
}

}  // namespace

Formula operator+(Formula left, const Formula& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

Formula lerp_formula(const Step& first, const Step& end, double weight) {
  const Formula difference = {end, first, DITORCH_SUBTRACT};
  if (weight < 0.5) {
    return Formula{first} + difference + Formula{weight, DITORCH_MULTIPLY, DITORCH_ADD};
  }
  return Formula{end} + difference + Formula{1 - weight, DITORCH_MULTIPLY, DITORCH_SUBTRACT};
}

std::optional<ditorch_dtype> compute_dtype(const Formula& formula, c10::ScalarType common,
                                           c10::ScalarType result) {
  const auto compute = compute_dtype_of(common);
  if (compute != DITORCH_INT64) return compute;
  for (const auto& step : formula) {
    if (step.kind == Step::opcode && is_floating_only(step.index)) {
      const auto floating = compute_dtype_of(result);
      return floating == DITORCH_INT64 ? std::nullopt : floating;
    }
  }
  return compute;
}

std::optional<c10::Scalar> number(const c10::IValue& value) {
  if (value.isScalar()) return value.toScalar();
  if (!value.isTensor() || !value.toTensor().defined()) return std::nullopt;
  const auto& tensor = value.toTensor();
  if (!tensor.is_cpu() || tensor.dim() != 0) return std::nullopt;
  return tensor.item();
}

bool add_constant(Program& program, const c10::Scalar& scalar, ditorch_dtype compute) {
  if (scalar.isComplex()) return false;
  const bool is_integer = scalar.isIntegral(/*includeBool=*/true);
  // torch fills integers with 1.0; beyond 2^53 a double no longer says which integer is meant.
  constexpr double kExact = 9007199254740992.0;
  const double value = scalar.toDouble();
  const bool is_whole = std::trunc(value) == value && std::fabs(value) <= kExact;
  if (compute == DITORCH_INT64 && !is_integer && !is_whole) return false;
  program.constant(value, is_integer ? scalar.toLong()
                          : is_whole ? static_cast<int64_t>(value)
                                     : 0);
  return true;
}

}  // namespace ditorch
