#include "ops/register.h"

#include <ATen/ops/_nested_tensor_size_native.h>
#include <torch/library.h>

#include <string>

#include "ops/attention.h"
#include "ops/grouped.h"
#include "ops/launch.h"
#include "ops/memory.h"
#include "ops/vendor_kernels.h"

namespace ditorch {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::PrivateUse1;

template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

// Libraries unregister when destroyed; these stay for the life of the process.
torch::Library& new_library(const char* name, c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, name, key, __FILE__, __LINE__);
}

// Operators that torch would otherwise take apart before they reach the fallback, although they are
// one operator: those the CPU has a kernel for (so that a chip gives what the CPU gives), a step of
// an optimizer over a list of tensors (one launch on real chips), and what the chip's kernel fuses.
// Structured operators work out the result's shape first and then call their .out form, which is
// only of use where the vendor has a kernel for that form: the host's kernel would do it again.
bool is_whole(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const auto& [name, overload] = op.operator_name();
  if (name.rfind("aten::_foreach_", 0) == 0) return true;
  if (name == "aten::_fused_rms_norm") return vendor_has_rms_norm();
  if (name.rfind("aten::_scaled_dot_product_fused_attention_overrideable", 0) == 0) {
    return overload.empty();
  }
  if (name == "aten::_grouped_mm") return overload.empty() && grouped::vendor_has();
  if (name == "aten::convolution_overrideable") return overload.empty();
  if (name == "aten::convolution_backward_overrideable") return overload.empty();
  if (name == "aten::mode" || name == "aten::conj_physical_") return true;  // CPU's, but composite
  return op.hasKernelForDispatchKey(DispatchKey::CPU) &&
         ((op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) &&
           !vendor_may_compute(name)) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
          op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd));
}

void register_whole_operators(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !is_whole(*op)) continue;
    library.impl(c10::toString(name).c_str(), boxed<&launch>());
  }
}

}  // namespace

void register_operators() {
  connect_vendor_kernels();
  new_library("_", kKey).fallback(boxed<&launch>());
  auto& library = new_library("aten", kKey);
  register_memory_operators(library);
  register_whole_operators(library);
  attention::register_on_host(new_library("aten", c10::DispatchKey::CPU),
                              new_library("ditorch", c10::DispatchKey::CPU));
  for (auto key :
       {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::QuantizedPrivateUse1,
        c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::NestedTensorPrivateUse1}) {
    new_library("_", key).fallback(boxed<&refuse_layout>());
  }
  library.impl("_nested_tensor_from_tensor_list", boxed<&refuse_layout>());
  // Autograd asks for the sizes of a nested tensor where an error ends the process.
  new_library("aten", c10::DispatchKey::NestedTensorPrivateUse1)
      .impl("_nested_tensor_size", TORCH_FN(at::native::_nested_tensor_size));
}

}  // namespace ditorch
