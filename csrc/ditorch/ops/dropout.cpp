#include "ops/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <mutex>

#include "ops/map.h"
#include "ops/pointwise.h"
#include "ops/tensors.h"
#include "runtime/generator.h"

namespace ditorch::dropout {
namespace {

// mask = whether the element is kept. Only a dense mask in the order of its dimensions gives each
// element the same number wherever its input lies.
ditorch_status draw_mask(const ditorch_context& context, int64_t key, double kept_share,
                         const at::Tensor& mask) {
  Operands operands(mask);
  const auto written = operands.add_written();
  if (written < 0) return DITORCH_NOT_IMPLEMENTED;
  Program program;
  program.random(key);
  program.constant(kept_share, 0);
  program.step(DITORCH_LESS);
  program.store(written);
  return operands.run(context, DITORCH_FLOAT32, program);
}

// native_dropout(input, p, train) -> out, mask
ditorch_status native_dropout(const ditorch_context& context, c10::ArrayRef<c10::IValue> arguments,
                              std::vector<c10::IValue>& results) {
  const auto& input = arguments[0].toTensor();
  const double dropped_share = arguments[1].toDouble();
  const bool trains = arguments[2].isNone() || arguments[2].toBool();
  if (!are_plain({input}) || !trains || !(dropped_share > 0 && dropped_share < 1)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const double kept_share = 1 - dropped_share;
  const auto mask = at::empty(input.sizes(), input.options().dtype(c10::kBool));
  const auto out = at::empty_like(input);
  auto status = draw_mask(context, draw_key(input.device().index()), kept_share, mask);
  if (status != DITORCH_OK) return status;
  const Formula kept = {argument(0), option(1), DITORCH_MULTIPLY, 1 / kept_share, DITORCH_MULTIPLY};
  results = {out, mask};
  return pointwise::compute(context, kept, {input, mask}, out);
}

}  // namespace

bool vendor_has() {
  Program program;
  program.random(/*key=*/0);
  return vendor_runs(std::move(program));
}

int64_t draw_key(c10::DeviceIndex device) {
  auto host = host_generator(default_generator(device));
  std::lock_guard lock(host.mutex());
  return static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(host)->random64());
}

VendorKernels all_kernels() { return {{"aten::native_dropout", native_dropout}}; }

}  // namespace ditorch::dropout
