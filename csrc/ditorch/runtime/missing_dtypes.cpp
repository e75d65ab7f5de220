// Every tensor that is not a view is born in aten::empty.memory_format or aten::empty_strided of
// its device: factories, .to(), .double() and operators' results alike. A device that lacks dtypes
// has these two kernels wrapped; all others keep theirs.
#include "runtime/missing_dtypes.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <vector>

namespace ditorch {
namespace {

struct Missing {
  std::string device_type;
  std::map<c10::ScalarType, c10::ScalarType> substitutes;
  std::map<c10::ScalarType, c10::ScalarType> refused;
};

struct Maker {
  const char* overload;
  size_t dtype_argument;
  std::optional<c10::SafeKernelFunction> original;
};

Missing& missing() {
  static auto* missing = new Missing();  // never destroyed: tensors may be made to the end
  return *missing;
}

Maker* makers() {
  static auto* makers = new Maker[2]{{"memory_format", 1, {}}, {"", 2, {}}};
  return makers;
}

c10::OperatorName name_of(const Maker& maker) {
  return {*maker.overload ? "aten::empty" : "aten::empty_strided", maker.overload};
}

void check_dtype(c10::IValue& argument) {
  auto dtype = argument.isNone() ? c10::get_default_dtype_as_scalartype() : argument.toScalarType();
  if (auto refused = missing().refused.find(dtype); refused != missing().refused.end()) {
    TORCH_CHECK_TYPE(false, "the device ", missing().device_type, " has no ", dtype,
                     " tensors; use ", refused->second, ", or keep this tensor on the cpu");
  }
  auto found = missing().substitutes.find(dtype);
  if (found == missing().substitutes.end()) return;
  TORCH_WARN_ONCE("the device ", missing().device_type, " has no ", dtype,
                  " tensors; ditorch makes them ", found->second, " instead");
  argument = found->second;
}

template <int kMaker>
void make(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto& maker = makers()[kMaker];
  auto first = stack->size() - op.schema().arguments().size();
  check_dtype((*stack)[first + maker.dtype_argument]);
  maker.original->callBoxed(op, keys, stack);
}

class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

template <int kMaker>
void wrap(torch::Library& library, c10::DispatchKey key) {
  auto& maker = makers()[kMaker];
  auto name = name_of(maker);
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), maker.overload);
  maker.original.emplace(op.getComputedKernelForDispatchKey(key));
  auto text = *maker.overload ? name.name + "." + maker.overload : name.name;
  library.impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&make<kMaker>>());
}

void wrap_makers(const std::string& device_type) {
  if (!missing().device_type.empty()) return;
  missing().device_type = device_type;
  auto options = c10::TensorOptions().device(c10::Device(device_type));
  auto key = options.computeDispatchKey();
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  Silence silence;  // torch warns that a kernel is replaced, which is the purpose
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  wrap<0>(*library, key);
  wrap<1>(*library, key);
}

}  // namespace

void substitute_dtypes(const std::string& device_type,
                       const std::map<c10::ScalarType, c10::ScalarType>& substitutes) {
  missing().substitutes = substitutes;
  wrap_makers(device_type);
}

void refuse_dtypes(const std::string& device_type,
                   const std::map<c10::ScalarType, c10::ScalarType>& refused) {
  missing().refused = refused;
  wrap_makers(device_type);
}

}  // namespace ditorch
