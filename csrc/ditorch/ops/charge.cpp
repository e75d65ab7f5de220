#include "ops/charge.h"

#include <algorithm>

#include "ops/attention.h"
#include "profiler/kernels.h"
#include "runtime/stream.h"

namespace ditorch {
namespace {

// The compute dtype: that of the first floating-point tensor, else of the first tensor.
ditorch_dtype compute_dtype(c10::ArrayRef<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.is_floating_point() || tensor.is_complex()) return abi_dtype(tensor.scalar_type());
  }
  return tensors.empty() ? DITORCH_OTHER : abi_dtype(tensors.front().scalar_type());
}

double product_flops(const Operator& op, const at::Tensor& left, const at::Tensor& right) {
  const auto elements = static_cast<double>(left.numel());
  if (left.dim() == 0 || right.dim() == 0) return elements;
  switch (op.product) {
    case Product::matrix:  // [.., m, k] @ [.., k, n]; n is 1 for a vector
      return 2 * elements * static_cast<double>(right.dim() < 2 ? 1 : right.size(-1));
    case Product::linear:  // [.., k] @ [n, k]^T
      return 2 * elements * static_cast<double>(right.dim() < 2 ? 1 : right.size(0));
    case Product::attention:
    case Product::none:
      break;
  }
  return 0;
}

}  // namespace

Charge::Charge(c10::DeviceIndex device) : device_(device), stream_(current_handle(device)) {
  const auto& runtime = *vendor().runtime;
  if (runtime.work_begin) check(runtime.work_begin(device_, stream_), "begin an operator");
}

void Charge::add(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kChip) return;
  for (const auto& known : tensors_) {
    if (known.is_same(tensor)) return;
  }
  tensors_.push_back(tensor);
}

void Charge::add(c10::ArrayRef<c10::IValue> values) {
  for (const auto& value : values) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) add(tensor);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) add(element.toTensor());
      }
    }
  }
}

void Charge::count_product(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.product == Product::none) return;
  if (op.product == Product::attention) {
    product_flops_ = attention::flops(op.name, arguments);
    return;
  }
  const auto& left = arguments[op.left];
  const auto& right = arguments[op.left + 1];
  if (left.isTensor() && right.isTensor()) {
    product_flops_ = product_flops(op, left.toTensor(), right.toTensor());
  }
}

void Charge::pay(const char* name, bool on_host) {
  const auto& runtime = *vendor().runtime;
  if (!runtime.work_end) return;
  ditorch_work work{};
  work.struct_size = sizeof(work);
  work.name = name;
  work.host_fallback = on_host;
  work.dtype = compute_dtype(tensors_);
  int64_t largest = 0;
  for (const auto& tensor : tensors_) {
    work.bytes += static_cast<double>(tensor.nbytes());
    largest = std::max(largest, tensor.numel());
  }
  work.flops = product_flops_ > 0 ? product_flops_ : static_cast<double>(largest);
  check(runtime.work_end(device_, stream_, &work), "end an operator");
  if (profiler_listens) record_kernel(device_, name, on_host);
}

ditorch_dtype abi_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return DITORCH_FLOAT32;
    case c10::ScalarType::Double:
      return DITORCH_FLOAT64;
    case c10::ScalarType::Half:
      return DITORCH_FLOAT16;
    case c10::ScalarType::BFloat16:
      return DITORCH_BFLOAT16;
    case c10::ScalarType::Char:
      return DITORCH_INT8;
    case c10::ScalarType::Short:
      return DITORCH_INT16;
    case c10::ScalarType::Int:
      return DITORCH_INT32;
    case c10::ScalarType::Long:
      return DITORCH_INT64;
    case c10::ScalarType::Byte:
      return DITORCH_UINT8;
    case c10::ScalarType::Bool:
      return DITORCH_BOOL;
    case c10::ScalarType::ComplexFloat:
      return DITORCH_COMPLEX64;
    case c10::ScalarType::ComplexDouble:
      return DITORCH_COMPLEX128;
    default:
      return DITORCH_OTHER;
  }
}

}  // namespace ditorch
