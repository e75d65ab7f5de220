#include "ops/wider.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <vector>

namespace ditorch {
namespace {

using c10::ScalarType;

// Bits of Operator::missing_dtypes.
constexpr uint8_t kHalf = 1, kBFloat16 = 2, kComplexHalf = 4;

uint8_t bit_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return kHalf;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::ComplexHalf:
      return kComplexHalf;
    default:
      return 0;
  }
}

ScalarType widened(ScalarType type) {
  if (type == ScalarType::ComplexHalf) return ScalarType::ComplexFloat;
  return bit_of(type) ? ScalarType::Float : type;
}

uint8_t bits_in(c10::ArrayRef<c10::IValue> values) {
  uint8_t bits = 0;
  for (const auto& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) bits |= bit_of(value.toTensor().scalar_type());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        if (tensor.defined()) bits |= bit_of(tensor.scalar_type());
      }
    }
  }
  return bits;
}

// One call in the wider dtypes.
class WiderCall {
 public:
  WiderCall(const c10::OperatorHandle& handle, const Operator& op) : handle_(handle), op_(op) {}

  void run(torch::jit::Stack* stack) {
    const auto& arguments = handle_.schema().arguments();
    const auto first = stack->size() - arguments.size();
    for (size_t i = first; i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      const bool names_dtype =
          arguments[i - first].real_type()->kind() == c10::TypeKind::ScalarTypeType ||
          is_optional_dtype(arguments[i - first]);
      value =
          names_dtype && value.isInt() ? widen_dtype(value) : widen(value, op_.writes[i - first]);
    }
    op_.host_kernel(handle_, stack);
    for (auto& [narrow, wide] : written_) {
      if (narrow.sizes() != wide.sizes()) narrow.resize_(wide.sizes());
      narrow.copy_(wide);
    }
    for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = narrow((*stack)[i]);
  }

 private:
  struct Written {
    at::Tensor narrow, wide;
  };

  static bool is_optional_dtype(const c10::Argument& argument) {
    const auto optional = argument.real_type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::ScalarTypeType;
  }

  c10::IValue widen_dtype(const c10::IValue& value) {
    const auto asked = value.toScalarType();
    has_wide_ |= asked == ScalarType::Float || asked == ScalarType::ComplexFloat;
    return widened(asked);
  }

  at::Tensor widen(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    const auto type = tensor.scalar_type();
    if (!bit_of(type)) {
      has_wide_ |=
          tensor.dim() > 0 && (type == ScalarType::Float || type == ScalarType::ComplexFloat);
      return tensor;
    }
    for (const auto& known : written_) {
      if (known.narrow.is_same(tensor)) return known.wide;
    }
    bits_ |= bit_of(type);
    auto wide = tensor.to(widened(type));
    if (is_written) written_.push_back({tensor, wide});
    return wide;
  }

  c10::IValue widen(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return widen(value.toTensor(), is_written);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> wide;
    for (const at::Tensor& tensor : value.toTensorList()) wide.push_back(widen(tensor, is_written));
    return wide;
  }

  // What the operator returns in its arguments' dtype; not so where it was given, or asked for, the
  // wider dtype itself.
  at::Tensor narrow(const at::Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& known : written_) {
      if (known.wide.is_same(result)) return known.narrow;
    }
    if (has_wide_) return result;
    const auto real = bits_ & kBFloat16 ? ScalarType::BFloat16 : ScalarType::Half;
    if (result.scalar_type() == ScalarType::Float) return result.to(real);
    if (result.scalar_type() == ScalarType::ComplexFloat) return result.to(ScalarType::ComplexHalf);
    return result;
  }

  c10::IValue narrow(const c10::IValue& value) const {
    if (value.isTensor()) return narrow(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> narrowed;
    for (const at::Tensor& tensor : value.toTensorList()) narrowed.push_back(narrow(tensor));
    return narrowed;
  }

  const c10::OperatorHandle& handle_;
  const Operator& op_;
  std::vector<Written> written_;
  uint8_t bits_ = 0;       // the narrow dtypes among the arguments
  bool has_wide_ = false;  // an argument has, or names, a dtype that others are widened to
};

}  // namespace

void compute_on_host(const c10::OperatorHandle& handle, const Operator& op,
                     torch::jit::Stack* stack) {
  const auto count = handle.schema().arguments().size();
  const auto arguments = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count);
  const auto bits = op.is_view ? uint8_t{0} : bits_in(arguments);
  if (!bits) return op.host_kernel(handle, stack);

  const auto below = static_cast<ptrdiff_t>(stack->size() - count);
  if (!(op.missing_dtypes & bits)) {
    const std::vector<c10::IValue> kept(arguments.begin(), arguments.end());
    std::exception_ptr refusal;
    try {
      return op.host_kernel(handle, stack);
    } catch (const c10::NotImplementedError&) {  // how torch says that a kernel lacks a dtype
      refusal = std::current_exception();
    }
    stack->erase(stack->begin() + below, stack->end());
    stack->insert(stack->end(), kept.begin(), kept.end());
    try {
      WiderCall(handle, op).run(stack);
    } catch (const c10::Error&) {
      std::rethrow_exception(refusal);  // it was not the dtype
    }
    op.missing_dtypes |= bits;
    return;
  }
  WiderCall(handle, op).run(stack);
}

}  // namespace ditorch
