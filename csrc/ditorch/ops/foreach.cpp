#include "ops/foreach.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "ops/charge.h"
#include "ops/formula.h"
#include "ops/tensors.h"

namespace ditorch::foreach {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;
using Tensors = std::vector<at::Tensor>;

const Step a = argument(0), b = argument(1), c = argument(2);

enum class Into { first_argument, fresh };

// An operand of every call: a list of tensors, or one element that serves them all.
struct Operand {
  int32_t argument;
  Tensors tensors;
  bool is_list;
};

// A call of a formula over the tensors [first, last) of its lists.
class ListCall {
 public:
  ListCall(const Formula& formula, Arguments arguments, const Tensors& written)
      : formula_(formula), arguments_(arguments), written_(written) {}

  ditorch_status run(const ditorch_context& context) {
    if (written_.empty() || !find_operands()) return DITORCH_NOT_IMPLEMENTED;
    const auto dtype = compute_dtype(formula_, common_dtype(), written_.front().scalar_type());
    if (!dtype) return DITORCH_NOT_IMPLEMENTED;
    for (size_t first = 0; first < written_.size();) {
      const size_t last = end_of_equal_scalars(first);
      const auto status = run_part(context, *dtype, first, last);
      if (status != DITORCH_OK) return status;
      first = last;
    }
    return DITORCH_OK;
  }

 private:
  bool find_operands() {
    for (const auto& step : formula_) {
      if (step.kind != Step::argument && step.kind != Step::option) continue;
      const auto& value = arguments_[step.index];
      if (operand_of(step.index) >= 0 || value.isScalar() || number(value)) continue;
      if (value.isTensor() && value.toTensor().dim() == 0) {
        operands_.push_back({step.index, {value.toTensor()}, false});
      } else if (value.isTensorList()) {
        operands_.push_back({step.index, value.toTensorVector(), true});
      } else if (!value.isList()) {
        return false;
      }
    }
    return operands_.size() < DITORCH_MAP_OPERANDS && are_dense(written_) &&
           std::all_of(
               operands_.begin(), operands_.end(),
               [this](const Operand& operand) {
                 return operand.is_list ? are_dense(operand.tensors) : is_scalar_of_chip(operand);
               });
  }

  bool is_scalar_of_chip(const Operand& operand) const {
    const auto& tensor = operand.tensors.front();
    return tensor.device() == written_.front().device() && !tensor.is_alias_of(written_.front());
  }

  // Of one dtype, and each like what is written: itself, or apart from it.
  bool are_dense(const Tensors& tensors) const {
    if (tensors.size() != written_.size()) return false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto &tensor = tensors[i], &out = written_[i];
      if (!out.defined() || out.device() != written_.front().device() || !are_alike(tensor, out) ||
          out.device().type() != kChip || tensor.numel() == 0 ||
          tensor.scalar_type() != tensors.front().scalar_type()) {
        return false;
      }
      const bool same = tensor.const_data_ptr() == out.const_data_ptr() &&
                        tensor.scalar_type() == out.scalar_type();
      if (tensor.is_alias_of(out) && !same) return false;
    }
    const auto dtype = abi_dtype(tensors.front().scalar_type());
    return dtype <= DITORCH_BOOL;
  }

  c10::ScalarType common_dtype() const {
    at::native::ResultTypeState state{};
    for (const auto& step : formula_) {
      if (step.kind != Step::argument) continue;
      const auto operand = operand_of(step.index);
      const auto& value = arguments_[step.index];
      if (operand >= 0) {
        state = at::native::update_result_type_state(operands_[operand].tensors.front(), state);
      } else if (value.isList()) {
        state = at::native::update_result_type_state(value.toListRef().front().toScalar(), state);
      } else {
        state = at::native::update_result_type_state(*number(value), state);
      }
    }
    const auto common = at::native::result_type(state);
    return common == c10::ScalarType::Undefined ? written_.front().scalar_type() : common;
  }

  int32_t operand_of(int32_t argument) const {
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (operands_[i].argument == argument) return static_cast<int32_t>(i);
    }
    return -1;
  }

  c10::Scalar scalar_of(int32_t argument, size_t index) const {
    const auto& value = arguments_[argument];
    return value.isList() ? value.toListRef()[index].toScalar() : *number(value);
  }

  // A program has one constant for all calls, so a list of unlike scalars takes several.
  size_t end_of_equal_scalars(size_t first) const {
    size_t last = written_.size();
    for (const auto& step : formula_) {
      if (step.kind != Step::argument && step.kind != Step::option) continue;
      if (operand_of(step.index) >= 0 || !arguments_[step.index].isList()) continue;
      const auto value = scalar_of(step.index, first);
      size_t end = first + 1;
      while (end < last && scalar_of(step.index, end).equal(value.toDouble())) ++end;
      last = end;
    }
    return last;
  }

  std::optional<Program> assemble(ditorch_dtype compute, size_t first) const {
    Program program;
    for (const auto& step : formula_) {
      if (step.kind == Step::opcode) {
        program.step(static_cast<ditorch_opcode>(step.index));
      } else if (step.kind == Step::constant) {
        program.constant(step.value, static_cast<int64_t>(step.value));
      } else if (const auto operand = operand_of(step.index); operand >= 0) {
        program.load(operand);
      } else if (!add_constant(program, scalar_of(step.index, first), compute)) {
        return std::nullopt;
      }
    }
    program.store(static_cast<int32_t>(operands_.size()));
    return program;
  }

  ditorch_status run_part(const ditorch_context& context, ditorch_dtype compute, size_t first,
                          size_t last) const {
    const auto program = assemble(compute, first);
    if (!program) return DITORCH_NOT_IMPLEMENTED;
    std::vector<ditorch_dtype> dtypes;
    std::vector<int64_t> strides, elements;
    std::vector<void*> data;
    for (const auto& operand : operands_) {
      dtypes.push_back(abi_dtype(operand.tensors.front().scalar_type()));
      strides.push_back(operand.is_list ? 1 : 0);
    }
    dtypes.push_back(abi_dtype(written_.front().scalar_type()));
    strides.push_back(1);
    for (size_t i = first; i < last; ++i) {
      elements.push_back(written_[i].numel());
      for (const auto& operand : operands_) {
        const auto& tensor = operand.tensors[operand.is_list ? i : 0];
        data.push_back(const_cast<void*>(tensor.const_data_ptr()));
      }
      data.push_back(written_[i].mutable_data_ptr());
    }
    const ditorch_map_list call{sizeof(call),
                                compute,
                                static_cast<int32_t>(dtypes.size()),
                                program->size(),
                                static_cast<int32_t>(elements.size()),
                                dtypes.data(),
                                strides.data(),
                                elements.data(),
                                data.data(),
                                program->data()};
    return vendor().operators->map_list(&context, &call);
  }

  const Formula& formula_;
  Arguments arguments_;
  const Tensors& written_;
  std::vector<Operand> operands_;
};

VendorKernel kernel(Formula formula, Into into) {
  return [formula = std::move(formula), into](const ditorch_context& context, Arguments arguments,
                                              Results& results) {
    Tensors written = arguments.front().toTensorVector();
    if (!vendor().operators->map_list) return DITORCH_NOT_IMPLEMENTED;
    if (into == Into::fresh) {
      for (auto& tensor : written) {
        if (!tensor.is_floating_point()) return DITORCH_NOT_IMPLEMENTED;
        tensor = at::empty_like(tensor);
      }
    }
    const auto status = ListCall(formula, arguments, written).run(context);
    if (into == Into::fresh) results = {c10::List<at::Tensor>(written)};
    return status;
  };
}

ditorch_status lerp(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto formula = lerp_formula(a, b, arguments[2].toScalar().toDouble());
  return kernel(formula, Into::first_argument)(context, arguments, results);
}

// The operator and its form in place.
void add(VendorKernels& kernels, const std::string& name, const std::string& overload,
         const Formula& formula) {
  const auto suffix = overload.empty() ? overload : "." + overload;
  kernels.emplace("aten::_foreach_" + name + suffix, kernel(formula, Into::fresh));
  kernels.emplace("aten::_foreach_" + name + "_" + suffix, kernel(formula, Into::first_argument));
}

}  // namespace

VendorKernels all_kernels() {
  VendorKernels kernels;
  for (const std::string kind : {"Scalar", "ScalarList", "List", "Tensor"}) {
    const bool scaled = kind == "List" || kind == "Tensor";
    const Formula other = scaled ? Formula{b, option(2), DITORCH_MULTIPLY} : Formula{b};
    add(kernels, "add", kind, Formula{a} + other + Formula{DITORCH_ADD});
    if (kind != "Tensor") {
      const Formula taken = kind == "List" ? other : Formula{b};
      add(kernels, "sub", kind, Formula{a} + taken + Formula{DITORCH_SUBTRACT});
      add(kernels, "maximum", kind, {a, b, DITORCH_MAXIMUM});
      add(kernels, "minimum", kind, {a, b, DITORCH_MINIMUM});
    }
    add(kernels, "mul", kind, {a, b, DITORCH_MULTIPLY});
    add(kernels, "div", kind, {a, b, DITORCH_DIVIDE});
  }
  for (const std::string kind : {"Scalar", "ScalarList"}) {
    const Formula product = {option(3), b, DITORCH_MULTIPLY, c, DITORCH_MULTIPLY, DITORCH_ADD};
    const Formula quotient = {option(3), b, DITORCH_MULTIPLY, c, DITORCH_DIVIDE, DITORCH_ADD};
    add(kernels, "addcmul", kind, Formula{a} + product);
    add(kernels, "addcdiv", kind, Formula{a} + quotient);
  }
  add(kernels, "sqrt", "", {a, DITORCH_SQRT});
  add(kernels, "neg", "", {a, DITORCH_NEGATE});
  add(kernels, "reciprocal", "", {a, DITORCH_RECIPROCAL});
  kernels.emplace("aten::_foreach_lerp_.Scalar", lerp);
  kernels.emplace("aten::_foreach_zero_", kernel({0.0}, Into::first_argument));
  kernels.emplace("aten::_foreach_copy_", kernel({b}, Into::first_argument));
  return kernels;
}

}  // namespace ditorch::foreach
