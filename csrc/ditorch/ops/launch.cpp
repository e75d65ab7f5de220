#include "ops/launch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <set>
#include <string_view>

#include "ops/charge.h"
#include "ops/host_arguments.h"
#include "ops/operator.h"
#include "ops/strict.h"
#include "ops/wider.h"
#include "runtime/generator.h"
#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

using Values = c10::ArrayRef<c10::IValue>;

std::optional<c10::DeviceIndex> chip_index(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kChip) return std::nullopt;
  return tensor.device().index();
}

// The device the operator runs on: its first device tensor's, else its device argument's.
c10::DeviceIndex find_device(Values arguments) {
  for (const auto& value : arguments) {
    std::optional<c10::DeviceIndex> found;
    if (value.isTensor()) {
      found = chip_index(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        if (!found) found = chip_index(tensor);
      }
    } else if (value.isDevice() && value.toDevice().has_index()) {
      found = value.toDevice().index();
    }
    if (found) return *found;
  }
  return current_device();
}

// A chip cannot read the host's memory or another chip's: as on any accelerator, only 0-dimensional
// CPU tensors may be mixed in. Lists of optional tensors are exempt because x[index] may use CPU
// indices.
void refuse_other_devices(const Operator& op, const c10::FunctionSchema& schema, Values arguments,
                          c10::Device here) {
  // Those that read lengths on the host, or copy from one device to another.
  static const std::set<std::string_view> take_host_tensors = {
      "_ctc_loss", "_ctc_loss_backward", "ctc_loss", "_foreach_copy", "_foreach_copy_"};
  const auto check = [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined() || tensor.device() == here) return;
    if (tensor.device().is_cpu() && (tensor.dim() == 0 || take_host_tensors.count(op.name))) return;
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at least two "
                "devices, ",
                here, " and ", tensor.device(), "! (argument ", argument.name(), " of ",
                schema.name(), ")");
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) {
      check(arguments[i].toTensor(), schema.arguments()[i]);
    } else if (arguments[i].isTensorList()) {
      for (const at::Tensor& tensor : arguments[i].toTensorList()) {
        check(tensor, schema.arguments()[i]);
      }
    }
  }
}

// Random operators draw from the device's generator. Most take it as an argument; the few that
// reach for the CPU's default generator find the device's state in it while they run.
class RandomNumbers {
 public:
  RandomNumbers(const Operator& op, c10::DeviceIndex device, c10::IValue* generator_argument) {
    if (generator_argument) {
      *generator_argument =
          host_generator(generator_argument->isNone() ? default_generator(device)
                                                      : generator_argument->toGenerator());
    } else if (op.seeded) {
      device_ = host_generator(default_generator(device));
      host_ = at::detail::getDefaultCPUGenerator();
      host_state_ = host_.get_state();
      host_.set_state(device_.get_state());
    }
  }

  ~RandomNumbers() {
    if (!host_.defined()) return;
    device_.set_state(host_.get_state());
    host_.set_state(host_state_);
  }

 private:
  at::Generator device_, host_;
  at::Tensor host_state_;
};

void run_on_host(const c10::OperatorHandle& handle, const Operator& op, c10::DeviceIndex device,
                 torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto first = stack->size() - schema.arguments().size();
  refuse_other_devices(op, schema, Values(*stack).slice(first), chip_device(device));

  HostArguments host(device, op.is_view ? Needs::shapes : Needs::elements);
  {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    for (size_t i = first; i < stack->size(); ++i) {
      (*stack)[i] = host.lend((*stack)[i], op.writes[i - first]);
    }
    RandomNumbers numbers(op, device, op.generator ? &(*stack)[first + *op.generator] : nullptr);
    const auto outputs = host.results_on_chip();
    // Profilers see one operator, however it is computed. The guard costs as much as the kernel of
    // a small tensor, so it stands only where somebody looks.
    std::optional<at::DisableRecordFunctionGuard> unseen;
    if (at::hasCallbacks()) unseen.emplace();
    compute_on_host(handle, op, stack);
  }
  host.write_back();
  for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = host.restore((*stack)[i]);
}

bool run_on_chip(const Operator& op, c10::DeviceIndex device, size_t arguments,
                 torch::jit::Stack* stack) {
  if (!op.vendor_kernel) return false;
  ditorch_context context{sizeof(context), device, current_handle(device)};
  std::vector<c10::IValue> results;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto status = op.vendor_kernel(context, Values(*stack).slice(stack->size() - arguments), results);
  if (status == DITORCH_NOT_IMPLEMENTED) return false;
  check(status, op.name.c_str());
  torch::jit::drop(*stack, arguments);
  for (auto& result : results) stack->push_back(std::move(result));
  return true;
}

// Whether all that an operator writes has no elements, and neither has the first tensor that it
// reads: an expert without tokens is no work that the chip lacks a kernel for.
bool computes_nothing(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<bool> first_is_empty, nothing_is_written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const bool is_empty = arguments[i].toTensor().numel() == 0;
    if (op.writes[i]) {
      nothing_is_written = nothing_is_written.value_or(true) && is_empty;
    } else if (!first_is_empty) {
      first_is_empty = is_empty;
    }
  }
  return nothing_is_written.value_or(true) &&
         first_is_empty.value_or(nothing_is_written.has_value());
}

}  // namespace

void launch(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto& op = Operator::of(handle);
  const auto count = handle.schema().arguments().size();
  const auto first = stack->size() - count;
  const auto device = find_device(Values(*stack).slice(first));
  c10::DeviceGuard guard(chip_device(device));
  if (op.is_view) return run_on_host(handle, op, device, stack);

  Charge charge(device);
  charge.add(Values(*stack).slice(first));
  charge.count_product(op, Values(*stack).slice(first));
  const bool on_host = !run_on_chip(op, device, count, stack);
  if (on_host) {
    if (!computes_nothing(op, Values(*stack).slice(first))) {
      refuse_host(handle, Values(*stack).slice(first));
      op.host_runs += 1;
      host_runs_here += 1;
    }
    run_on_host(handle, op, device, stack);
  } else {
    op.chip_runs += 1;
  }
  charge.add(Values(*stack).slice(first));
  charge.pay(op.name.c_str(), on_host);
  if (op.synchronizes) {
    check(vendor().runtime->stream_synchronize(device, current_handle(device)), "synchronize");
  }
}

void refuse_layout(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, handle.schema().name(), ": the device ", vendor().devices.front().library,
      " holds dense tensors only, not sparse, quantized or nested ones; keep "
      "such tensors on the CPU, or give nested ones layout=torch.jagged");
}

}  // namespace ditorch
