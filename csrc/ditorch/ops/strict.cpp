#include "ops/strict.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <atomic>

#include "runtime/vendor.h"

namespace ditorch {
namespace {

std::atomic<bool> strict_mode{false};
thread_local std::string module_here;

void append_dtype(std::string& text, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (!text.empty()) text += ", ";
  text += c10::toString(tensor.scalar_type());
}

std::string dtypes_of(c10::ArrayRef<c10::IValue> arguments) {
  std::string text;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      append_dtype(text, value.toTensor());
    } else if (value.isTensorList() && !value.toTensorList().empty()) {
      append_dtype(text, value.toTensorList()[0]);
    }
  }
  return text;
}

}  // namespace

void set_strict(bool strict) { strict_mode = strict; }

bool is_strict() { return strict_mode.load(std::memory_order_relaxed); }

void set_module(std::string name) { module_here = std::move(name); }

void refuse_host(const c10::OperatorHandle& handle, c10::ArrayRef<c10::IValue> arguments) {
  if (!is_strict()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "DITORCH_STRICT=1: ", c10::toString(handle.operator_name()), " of (",
      dtypes_of(arguments), ") in ",
      module_here.empty() ? std::string("no module's forward") : "module " + module_here,
      " would be computed by the host, as the device ", vendor().devices.front().library,
      " has no kernel that takes it");
}

}  // namespace ditorch
