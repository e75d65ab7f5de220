#include "ops/formula.h"

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <cmath>

#include "ops/charge.h"

namespace ditorch {
namespace {

bool is_floating_only(int32_t opcode) {
  return (opcode >= DITORCH_SQRT && opcode <= DITORCH_SIGMOID) || opcode == DITORCH_DIVIDE ||
         opcode == DITORCH_POWER;
}

bool compares(int32_t opcode) {
  return opcode == DITORCH_LESS || opcode == DITORCH_LESS_EQUAL || opcode == DITORCH_EQUAL ||
         opcode == DITORCH_MAXIMUM || opcode == DITORCH_MINIMUM;
}

// Whether elements of the dtype `from` compare as they do in the dtype `to`: programs compute in
// that very dtype, or all of the elements are among its values.
bool compare_alike(c10::ScalarType from, c10::ScalarType to) {
  if (from == to || abi_dtype(to) == compute_dtype_of(to)) return true;
  return at::isIntegralType(to, /*includeBool=*/false) &&
         (from == c10::kBool || (at::isIntegralType(from, /*includeBool=*/false) &&
                                 c10::elementSize(from) < c10::elementSize(to)));
}

// The number as a value of the dtype; nothing if the dtype cannot hold it.
std::optional<c10::Scalar> convert(const c10::Scalar& scalar, c10::ScalarType dtype) {
  std::optional<c10::Scalar> converted;
  if (scalar.isComplex() || abi_dtype(dtype) > DITORCH_BOOL) return converted;
  AT_DISPATCH_ALL_TYPES_AND3(c10::kHalf, c10::kBFloat16, c10::kBool, dtype, "convert", [&] {
    const bool overflows = scalar.isIntegral(/*includeBool=*/true)
                               ? c10::overflows<scalar_t>(scalar.toLong())
                               : c10::overflows<scalar_t>(scalar.toDouble());
    if (!overflows) converted = scalar.to<scalar_t>();
  });
  return converted;
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

std::optional<c10::ScalarType> compared_dtype(const Formula& formula, c10::ScalarType common) {
  const bool is_comparison = std::any_of(formula.begin(), formula.end(), [](const Step& step) {
    return step.kind == Step::opcode && compares(step.index);
  });
  return is_comparison ? std::make_optional(common) : std::nullopt;
}

bool takes_tensor(const Step& step, c10::ScalarType dtype, std::optional<c10::ScalarType> compared,
                  c10::ScalarType result) {
  if (step.kind == Step::condition) return dtype == c10::kBool;
  if (step.kind == Step::argument) return !compared || compare_alike(dtype, *compared);
  return result != c10::kBool || !at::isFloatingType(dtype);
}

std::optional<c10::Scalar> number(const c10::IValue& value) {
  if (value.isScalar()) return value.toScalar();
  if (!value.isTensor() || !value.toTensor().defined()) return std::nullopt;
  const auto& tensor = value.toTensor();
  if (!tensor.is_cpu() || tensor.dim() != 0) return std::nullopt;
  return tensor.item();
}

std::optional<c10::Scalar> number_in_formula(const Step& step, const c10::Scalar& scalar,
                                             std::optional<c10::ScalarType> compared,
                                             c10::ScalarType result) {
  if (step.kind == Step::option && !convert(scalar, result)) return std::nullopt;
  return step.kind == Step::argument && compared ? convert(scalar, *compared) : scalar;
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
