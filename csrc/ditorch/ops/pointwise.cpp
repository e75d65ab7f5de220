#include "ops/pointwise.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>

#include "ops/map.h"

namespace ditorch::pointwise {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

const Step a = argument(0), b = argument(1), c = argument(2);

// Where the result goes.
enum class Into { last_argument, first_argument, like_first, fresh };

// The dtype to which the arguments of the formula promote; `otherwise` if none takes part.
c10::ScalarType common_dtype(const Formula& formula, Arguments arguments,
                             c10::ScalarType otherwise) {
  at::native::ResultTypeState state{};
  for (const auto& step : formula) {
    if (step.kind != Step::argument) continue;
    const auto& value = arguments[step.index];
    if (value.isTensor() && value.toTensor().defined()) {
      state = at::native::update_result_type_state(value.toTensor(), state);
    } else if (value.isScalar()) {
      state = at::native::update_result_type_state(value.toScalar(), state);
    }
  }
  const auto common = at::native::result_type(state);
  return common == c10::ScalarType::Undefined ? otherwise : common;
}

// A factor that changes nothing.
bool is_one(const Step& step, Arguments arguments) {
  if (step.kind != Step::option || !arguments[step.index].isScalar()) return false;
  return arguments[step.index].toScalar().equal(1);
}

// Whether no tensor takes part in it.
bool is_constant(const Formula& formula) {
  return std::all_of(formula.begin(), formula.end(), [](const Step& step) {
    return step.kind == Step::constant || step.kind == Step::opcode;
  });
}

std::optional<Program> assemble(const Formula& formula, Arguments arguments, Operands& operands,
                                ditorch_dtype compute, std::optional<c10::ScalarType> compared,
                                c10::ScalarType result) {
  Program program;
  for (size_t i = 0; i < formula.size(); ++i) {
    const auto& step = formula[i];
    const bool multiplies = i + 1 < formula.size() && formula[i + 1].kind == Step::opcode &&
                            formula[i + 1].index == DITORCH_MULTIPLY;
    if (multiplies && is_one(step, arguments)) {
      ++i;
    } else if (step.kind == Step::opcode) {
      program.step(static_cast<ditorch_opcode>(step.index));
    } else if (step.kind == Step::constant) {
      program.constant(step.value, static_cast<int64_t>(step.value));
    } else if (const auto scalar = number(arguments[step.index])) {
      const auto value = number_in_formula(step, *scalar, compared, result);
      if (!value || !add_constant(program, *value, compute)) return std::nullopt;
    } else {
      const auto& value = arguments[step.index];
      if (!value.isTensor() || !value.toTensor().defined()) return std::nullopt;
      const auto dtype = value.toTensor().scalar_type();
      if (!takes_tensor(step, dtype, compared, result)) return std::nullopt;
      const auto operand = operands.add(value.toTensor());
      if (operand < 0) return std::nullopt;
      program.load(operand);
    }
  }
  const auto out = operands.add_written();
  if (out < 0) return std::nullopt;
  program.store(out);
  return program;
}

// Memory for the result of an operator without a form that writes to a given tensor.
at::Tensor make_result(const Formula& formula, Arguments arguments) {
  std::vector<int64_t> sizes;
  std::optional<c10::Device> device;
  for (const auto& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& tensor = value.toTensor();
    if (tensor.device().type() == kChip) device = tensor.device();
    if (static_cast<size_t>(tensor.dim()) > sizes.size()) {
      sizes.insert(sizes.begin(), tensor.dim() - sizes.size(), 1);
    }
    for (int64_t dim = 1; dim <= tensor.dim(); ++dim) {
      auto& size = sizes[sizes.size() - dim];
      if (size == 1) size = tensor.size(-dim);
    }
  }
  const auto dtype = common_dtype(formula, arguments, c10::kFloat);
  return device ? at::empty(sizes, at::TensorOptions(*device).dtype(dtype)) : at::Tensor();
}

at::Tensor find_written(Into into, const Formula& formula, Arguments arguments) {
  switch (into) {
    case Into::last_argument:
      return arguments.back().toTensor();
    case Into::first_argument:
      return arguments.front().toTensor();
    case Into::like_first:
      return at::empty_like(arguments.front().toTensor());
    case Into::fresh:
      break;
  }
  return make_result(formula, arguments);
}

VendorKernel kernel(Formula formula, Into into) {
  return [formula = std::move(formula), into](const ditorch_context& context, Arguments arguments,
                                              Results& results) {
    const auto written = find_written(into, formula, arguments);
    if (!written.defined()) return DITORCH_NOT_IMPLEMENTED;
    const auto status = compute(context, formula, arguments, written);
    results = {written};
    return status;
  };
}

// pow.Tensor_Scalar_out(self, exponent, out): the usual exponents need no logarithm. Integers to a
// floating power are floating before they are multiplied.
ditorch_status pow_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto scalar = arguments[1].toScalar();
  if (scalar.isComplex()) return DITORCH_NOT_IMPLEMENTED;
  const double exponent = scalar.toDouble();
  const bool keeps_integers =
      arguments[0].toTensor().is_floating_point() == arguments[2].toTensor().is_floating_point();
  Formula formula = {a, b, DITORCH_POWER};
  if (exponent == 1) formula = {a};  // in the gradient of a square
  if (exponent == 2 && keeps_integers) formula = {a, a, DITORCH_MULTIPLY};
  if (exponent == 3 && keeps_integers) formula = {a, a, DITORCH_MULTIPLY, a, DITORCH_MULTIPLY};
  if (exponent == 0.5) formula = {a, DITORCH_SQRT};
  if (exponent == -0.5) formula = {a, DITORCH_RSQRT};
  if (exponent == -1) formula = {a, DITORCH_RECIPROCAL};
  return kernel(formula, Into::last_argument)(context, arguments, results);
}

// clamp.out(self, min, max, out), clamp.Tensor_out alike; either bound may be absent.
ditorch_status clamp_out(const ditorch_context& context, Arguments arguments, Results& results) {
  Formula formula = {a};
  if (!arguments[1].isNone()) formula.insert(formula.end(), {b, DITORCH_MAXIMUM});
  if (!arguments[2].isNone()) formula.insert(formula.end(), {c, DITORCH_MINIMUM});
  return kernel(formula, Into::last_argument)(context, arguments, results);
}

// floor_divide(self, other): of integers by a number; the host says what a division by 0 is.
template <Into into>
ditorch_status floor_divide(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto divisor = number(arguments[1]);
  if (!at::isIntegralType(arguments[0].toTensor().scalar_type(), /*includeBool=*/false) ||
      !divisor || !divisor->isIntegral(/*includeBool=*/false) || divisor->equal(0)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  return kernel({a, b, DITORCH_FLOOR_DIVIDE}, into)(context, arguments, results);
}

// lerp.Scalar_out(self, end, weight, out)
ditorch_status lerp_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto weight = arguments[2].toScalar();
  if (weight.isComplex()) return DITORCH_NOT_IMPLEMENTED;
  const auto formula = lerp_formula(a, b, weight.toDouble());
  return kernel(formula, Into::last_argument)(context, arguments, results);
}

// relu(self): torch refuses truth values.
template <Into into>
ditorch_status relu(const ditorch_context& context, Arguments arguments, Results& results) {
  if (arguments[0].toTensor().scalar_type() == c10::kBool) return DITORCH_NOT_IMPLEMENTED;
  return kernel({a, 0.0, DITORCH_MAXIMUM}, into)(context, arguments, results);
}

// abs.out(self, out), which torch calls with memory that has no size yet.
ditorch_status abs_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[1].toTensor();
  if (out.numel() == 0 && self.numel() > 0 && !self.is_complex()) out.resize_(self.sizes());
  return kernel({a, DITORCH_ABS}, Into::last_argument)(context, arguments, results);
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kCountable = 1LL << 51;  // a float64 counts the steps between integers up to it

constexpr double kRootHalf = std::numbers::sqrt2 / 2;
constexpr double kNormal = std::numbers::inv_sqrtpi * kRootHalf;         // 1 / sqrt(2 pi)
constexpr double kTanhScale = std::numbers::inv_sqrtpi * 2 * kRootHalf;  // sqrt(2 / pi)
constexpr double kCubic = 0.044715;

// (1 + erf(x / sqrt(2))) / 2
Formula normal_cdf(const Step& x) {
  return {1.0, x, kRootHalf, DITORCH_MULTIPLY, DITORCH_ERF, DITORCH_ADD, 0.5, DITORCH_MULTIPLY};
}

// tanh(sqrt(2 / pi) * (x + 0.044715 x^3))
Formula gelu_tanh(const Step& x) {
  return {x,
          x,
          x,
          DITORCH_MULTIPLY,
          kCubic,
          DITORCH_MULTIPLY,
          1.0,
          DITORCH_ADD,
          DITORCH_MULTIPLY,
          kTanhScale,
          DITORCH_MULTIPLY,
          DITORCH_TANH};
}

// gelu.out(self, approximate, out)
ditorch_status gelu_out(const ditorch_context& context, Arguments arguments, Results& results) {
  Formula share = normal_cdf(a);
  if (arguments[1].toStringRef() == "tanh") {
    share = gelu_tanh(a) + Formula{1.0, DITORCH_ADD, 0.5, DITORCH_MULTIPLY};
  }
  const auto formula = Formula{a} + share + Formula{DITORCH_MULTIPLY};
  return kernel(formula, Into::last_argument)(context, arguments, results);
}

// gelu_backward.grad_input(grad_output, self, approximate, grad_input)
ditorch_status gelu_backward_out(const ditorch_context& context, Arguments arguments,
                                 Results& results) {
  const Step &grad = a, &x = b;
  Formula slope;
  if (arguments[2].toStringRef() == "tanh") {
    // (1 + t) / 2 + x (1 - t^2) / 2 * sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
    const Formula t = gelu_tanh(x);
    slope = t + Formula{1.0, DITORCH_ADD, 0.5, DITORCH_MULTIPLY, 1.0} + t + t +
            Formula{DITORCH_MULTIPLY,
                    DITORCH_SUBTRACT,
                    x,
                    DITORCH_MULTIPLY,
                    0.5 * kTanhScale,
                    DITORCH_MULTIPLY,
                    x,
                    x,
                    DITORCH_MULTIPLY,
                    3 * kCubic,
                    DITORCH_MULTIPLY,
                    1.0,
                    DITORCH_ADD,
                    DITORCH_MULTIPLY,
                    DITORCH_ADD};
  } else {
    slope = normal_cdf(x) + Formula{x,           x,       DITORCH_MULTIPLY, -0.5, DITORCH_MULTIPLY,
                                    DITORCH_EXP, kNormal, DITORCH_MULTIPLY, x,    DITORCH_MULTIPLY,
                                    DITORCH_ADD};
  }
  const auto formula = Formula{grad} + slope + Formula{DITORCH_MULTIPLY};
  return kernel(formula, Into::last_argument)(context, arguments, results);
}

// arange.start_out(start, end, step, out), which torch calls with memory that has no size yet.
ditorch_status arange_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto start = arguments[0].toScalar(), end = arguments[1].toScalar();
  const auto step = arguments[2].toScalar();
  const auto& out = arguments[3].toTensor();
  const auto has = [&](auto is) { return is(start) || is(end) || is(step); };
  if (has([](const c10::Scalar& given) { return given.isComplex() || given.isSymbolic(); })) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const double places = std::ceil((end.toDouble() - start.toDouble()) / step.toDouble());
  const bool in_integers = at::isIntegralType(out.scalar_type(), /*includeBool=*/false);
  const bool is_inexact =
      in_integers && has([](const c10::Scalar& given) {
        return !given.isIntegral(true) || std::fabs(given.toDouble()) > kCountable;
      });
  if (!(places > 0 && places < kCountable) || is_inexact) return DITORCH_NOT_IMPLEMENTED;
  const auto count = static_cast<int64_t>(places);
  if (out.numel() == 0) out.resize_({count});
  if (out.dim() != 1 || out.size(0) != count) return DITORCH_NOT_IMPLEMENTED;
  const auto compute = in_integers ? DITORCH_INT64 : DITORCH_FLOAT64;
  Operands operands(out);
  const auto written = operands.add_written();
  Program program;
  program.step(DITORCH_PLACE);
  if (written < 0 || !add_constant(program, step, compute)) return DITORCH_NOT_IMPLEMENTED;
  program.step(DITORCH_MULTIPLY);
  if (!add_constant(program, start, compute)) return DITORCH_NOT_IMPLEMENTED;
  program.step(DITORCH_ADD);
  program.store(written);
  results = {out};
  return operands.run(context, compute, program);
}

// A vector of 0, 1, 2, ...
at::Tensor places(const ditorch_context& context, const at::Tensor& like, int64_t count) {
  const auto vector = at::empty({count}, like.options().dtype(c10::kLong));
  return compute(context, {DITORCH_PLACE}, {}, vector) == DITORCH_OK ? vector : at::Tensor();
}

// tril.out(self, diagonal, out), triu.out alike: what stands on the wrong side of it is zero.
template <bool is_lower>
ditorch_status triangle_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[2].toTensor();
  if (self.dim() < 2 || self.numel() == 0 || self.sizes() != out.sizes()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto rows = places(context, self, self.size(-2)),
             columns = places(context, self, self.size(-1));
  if (!rows.defined() || !columns.defined()) return DITORCH_NOT_IMPLEMENTED;
  const auto diagonal = static_cast<double>(arguments[1].toInt());
  const Formula to_row = {option(1), diagonal, DITORCH_ADD}, column = {option(2)};
  const Formula kept = (is_lower ? column + to_row : to_row + column) + Formula{DITORCH_LESS_EQUAL};
  results = {out};
  return compute(context, kept + Formula{a, 0.0, DITORCH_SELECT},
                 {self, rows.unsqueeze(1), columns}, out);
}

// Of truth values, or of the bits of integers.
VendorKernel bitwise_kernel(Formula truth, Formula bits) {
  return [of_truth = kernel(std::move(truth), Into::last_argument),
          of_bits = kernel(std::move(bits), Into::last_argument)](
             const ditorch_context& context, Arguments arguments, Results& results) {
    const auto type = arguments.back().toTensor().scalar_type();
    return (type == c10::kBool ? of_truth : of_bits)(context, arguments, results);
  };
}

// __rshift__.Scalar(self, places), __lshift__.Scalar, and bitwise_right_shift.Tensor_out(self,
// places, out) and its like: by a number of places that the dtype has.
template <ditorch_opcode opcode, Into into>
ditorch_status shift(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto places = number(arguments[1]);
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false) || !places ||
      !places->isIntegral(/*includeBool=*/false) || places->toLong() < 0 ||
      places->toLong() >= static_cast<int64_t>(8 * self.element_size())) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  return kernel({a, option(1), opcode}, into)(context, arguments, results);
}

void add_out(VendorKernels& kernels, const char* name, Formula formula) {
  kernels.emplace(name, kernel(std::move(formula), Into::last_argument));
}

void add_arithmetic(VendorKernels& kernels) {
  add_out(kernels, "aten::add.out", {a, b, option(2), DITORCH_MULTIPLY, DITORCH_ADD});
  add_out(kernels, "aten::sub.out", {a, b, option(2), DITORCH_MULTIPLY, DITORCH_SUBTRACT});
  add_out(kernels, "aten::mul.out", {a, b, DITORCH_MULTIPLY});
  add_out(kernels, "aten::div.out", {a, b, DITORCH_DIVIDE});
  add_out(kernels, "aten::maximum.out", {a, b, DITORCH_MAXIMUM});
  add_out(kernels, "aten::minimum.out", {a, b, DITORCH_MINIMUM});
  const Formula product = {option(3), b, DITORCH_MULTIPLY, c, DITORCH_MULTIPLY, DITORCH_ADD};
  const Formula quotient = {option(3), b, DITORCH_MULTIPLY, c, DITORCH_DIVIDE, DITORCH_ADD};
  add_out(kernels, "aten::addcmul.out", Formula{a} + product);
  add_out(kernels, "aten::addcdiv.out", Formula{a} + quotient);
  kernels.emplace("aten::floor_divide", floor_divide<Into::fresh>);
  kernels.emplace("aten::floor_divide.out", floor_divide<Into::last_argument>);
  kernels.emplace("aten::floor_divide_.Tensor", floor_divide<Into::first_argument>);
  kernels.emplace("aten::lerp.Scalar_out", lerp_out);
  kernels.emplace("aten::pow.Tensor_Scalar_out", pow_out);
  add_out(kernels, "aten::pow.Tensor_Tensor_out", {a, b, DITORCH_POWER});
  kernels.emplace("aten::clamp.out", clamp_out);
  kernels.emplace("aten::clamp.Tensor_out", clamp_out);
  add_out(kernels, "aten::clamp_min.out", {a, b, DITORCH_MAXIMUM});
  add_out(kernels, "aten::clamp_max.out", {a, b, DITORCH_MINIMUM});
}

void add_functions(VendorKernels& kernels) {
  add_out(kernels, "aten::neg.out", {a, DITORCH_NEGATE});
  kernels.emplace("aten::abs.out", abs_out);
  add_out(kernels, "aten::sqrt.out", {a, DITORCH_SQRT});
  add_out(kernels, "aten::rsqrt.out", {a, DITORCH_RSQRT});
  add_out(kernels, "aten::reciprocal.out", {a, DITORCH_RECIPROCAL});
  add_out(kernels, "aten::exp.out", {a, DITORCH_EXP});
  add_out(kernels, "aten::log.out", {a, DITORCH_LOG});
  add_out(kernels, "aten::sin.out", {a, DITORCH_SIN});
  add_out(kernels, "aten::cos.out", {a, DITORCH_COS});
  add_out(kernels, "aten::tanh.out", {a, DITORCH_TANH});
  add_out(kernels, "aten::erf.out", {a, DITORCH_ERF});
  add_out(kernels, "aten::sigmoid.out", {a, DITORCH_SIGMOID});
}

void add_comparisons(VendorKernels& kernels) {
  for (const std::string kind : {"Tensor_out", "Scalar_out"}) {
    add_out(kernels, ("aten::lt." + kind).c_str(), {a, b, DITORCH_LESS});
    add_out(kernels, ("aten::le." + kind).c_str(), {a, b, DITORCH_LESS_EQUAL});
    add_out(kernels, ("aten::gt." + kind).c_str(), {b, a, DITORCH_LESS});
    add_out(kernels, ("aten::ge." + kind).c_str(), {b, a, DITORCH_LESS_EQUAL});
    add_out(kernels, ("aten::eq." + kind).c_str(), {a, b, DITORCH_EQUAL});
    add_out(kernels, ("aten::ne." + kind).c_str(), {a, b, DITORCH_EQUAL, DITORCH_NOT});
  }
  add_out(kernels, "aten::isposinf.out", {a, kInfinity, DITORCH_EQUAL});
  add_out(kernels, "aten::isneginf.out", {a, -kInfinity, DITORCH_EQUAL});
  kernels.emplace("aten::where.self", kernel({condition(0), b, c, DITORCH_SELECT}, Into::fresh));
  add_out(kernels, "aten::where.self_out", {condition(0), b, c, DITORCH_SELECT});
  const Formula filled = {condition(1), option(2), a, DITORCH_SELECT};
  kernels.emplace("aten::masked_fill_.Scalar", kernel(filled, Into::first_argument));
  kernels.emplace("aten::masked_fill_.Tensor", kernel(filled, Into::first_argument));
  kernels.emplace("aten::fill_.Scalar", kernel({option(1)}, Into::first_argument));
  kernels.emplace("aten::fill_.Tensor", kernel({option(1)}, Into::first_argument));
  kernels.emplace("aten::zero_", kernel({0.0}, Into::first_argument));
  kernels.emplace("aten::arange.start_out", arange_out);
  kernels.emplace("aten::tril.out", triangle_out<true>);
  kernels.emplace("aten::triu.out", triangle_out<false>);
}

void add_bits(VendorKernels& kernels) {
  kernels.emplace("aten::bitwise_and.Tensor_out",
                  bitwise_kernel({a, b, DITORCH_AND}, {a, b, DITORCH_BIT_AND}));
  kernels.emplace("aten::bitwise_or.Tensor_out",
                  bitwise_kernel({a, b, DITORCH_OR}, {a, b, DITORCH_BIT_OR}));
  kernels.emplace("aten::bitwise_xor.Tensor_out",
                  bitwise_kernel({a, b, DITORCH_EQUAL, DITORCH_NOT}, {a, b, DITORCH_BIT_XOR}));
  kernels.emplace("aten::bitwise_not.out",
                  bitwise_kernel({a, DITORCH_NOT}, {-1.0, a, DITORCH_SUBTRACT}));
  kernels.emplace("aten::__lshift__.Scalar", shift<DITORCH_SHIFT_LEFT, Into::like_first>);
  kernels.emplace("aten::__rshift__.Scalar", shift<DITORCH_SHIFT_RIGHT, Into::like_first>);
  kernels.emplace("aten::__ilshift__.Scalar", shift<DITORCH_SHIFT_LEFT, Into::first_argument>);
  kernels.emplace("aten::__irshift__.Scalar", shift<DITORCH_SHIFT_RIGHT, Into::first_argument>);
  kernels.emplace("aten::bitwise_left_shift.Tensor_out",
                  shift<DITORCH_SHIFT_LEFT, Into::last_argument>);
  kernels.emplace("aten::bitwise_right_shift.Tensor_out",
                  shift<DITORCH_SHIFT_RIGHT, Into::last_argument>);
}

void add_activations(VendorKernels& kernels) {
  const Step &grad = a, &x = b;  // a gradient's arguments
  add_out(kernels, "aten::silu.out", {a, a, DITORCH_SIGMOID, DITORCH_MULTIPLY});
  // grad * s * (1 + x * (1 - s)) with s = sigmoid(x)
  const Formula silu_backward = {grad,
                                 x,
                                 DITORCH_SIGMOID,
                                 DITORCH_MULTIPLY,
                                 1.0,
                                 x,
                                 1.0,
                                 x,
                                 DITORCH_SIGMOID,
                                 DITORCH_SUBTRACT,
                                 DITORCH_MULTIPLY,
                                 DITORCH_ADD,
                                 DITORCH_MULTIPLY};
  kernels.emplace("aten::silu_backward", kernel(silu_backward, Into::like_first));
  // of the result y: grad * (1 - y) * y, grad * (1 - y^2)
  add_out(kernels, "aten::sigmoid_backward.grad_input",
          {grad, 1.0, x, DITORCH_SUBTRACT, DITORCH_MULTIPLY, x, DITORCH_MULTIPLY});
  add_out(kernels, "aten::tanh_backward.grad_input",
          {grad, 1.0, x, x, DITORCH_MULTIPLY, DITORCH_SUBTRACT, DITORCH_MULTIPLY});
  const Formula dropped = {a, b, DITORCH_MULTIPLY, option(2), DITORCH_MULTIPLY};
  kernels.emplace("aten::native_dropout_backward",
                  [gradient = kernel(dropped, Into::like_first)](
                      const ditorch_context& context, Arguments arguments, Results& results) {
                    // of whole numbers torch makes floating ones
                    if (!arguments[0].toTensor().is_floating_point())
                      return DITORCH_NOT_IMPLEMENTED;
                    return gradient(context, arguments, results);
                  });
  kernels.emplace("aten::relu", relu<Into::like_first>);
  kernels.emplace("aten::relu_", relu<Into::first_argument>);
  add_out(kernels, "aten::threshold_backward.grad_input",
          {x, option(2), DITORCH_LESS_EQUAL, 0.0, grad, DITORCH_SELECT});
  kernels.emplace("aten::gelu.out", gelu_out);
  kernels.emplace("aten::gelu_backward.grad_input", gelu_backward_out);
}

}  // namespace

ditorch_status compute(const ditorch_context& context, const Formula& formula, Arguments arguments,
                       const at::Tensor& written) {
  if (written.numel() == 0 && is_constant(formula)) return DITORCH_OK;  // nothing is filled
  const auto result = written.scalar_type();
  const auto common = common_dtype(formula, arguments, result);
  const auto dtype = compute_dtype(formula, common, result);
  if (!dtype) return DITORCH_NOT_IMPLEMENTED;
  Operands operands(written);
  const auto program =
      assemble(formula, arguments, operands, *dtype, compared_dtype(formula, common), result);
  return program ? operands.run(context, *dtype, *program) : DITORCH_NOT_IMPLEMENTED;
}

VendorKernels all_kernels() {
  VendorKernels kernels;
  add_arithmetic(kernels);
  add_functions(kernels);
  add_comparisons(kernels);
  add_bits(kernels);
  add_activations(kernels);
  return kernels;
}

}  // namespace ditorch::pointwise
