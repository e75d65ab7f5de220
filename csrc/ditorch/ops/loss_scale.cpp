#include "ops/loss_scale.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "ops/pointwise.h"
#include "ops/reductions.h"
#include "ops/tensors.h"

namespace ditorch::loss_scale {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

// Scalars of the chip that are read and written in float32, as GradScaler has them.
bool are_scalars(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  return are_plain(tensors) &&
         std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
           return tensor.numel() == 1 && tensor.scalar_type() == c10::kFloat;
         });
}

// _amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale): found_inf
// becomes 1 if an element is infinite or NaN, whose product with 0 is NaN and not 0.
ditorch_status check_and_unscale(const ditorch_context& context, Arguments arguments, Results&) {
  const auto gradients = arguments[0].toTensorVector();
  const auto &found = arguments[1].toTensor(), &inverse = arguments[2].toTensor();
  if (gradients.empty() || !are_scalars({found, inverse})) return DITORCH_NOT_IMPLEMENTED;
  for (const auto& gradient : gradients) {
    if (!are_plain({gradient, found}) || !gradient.is_contiguous()) return DITORCH_NOT_IMPLEMENTED;
  }
  const Step x = argument(0);
  const auto none = at::empty({static_cast<int64_t>(gradients.size())}, found.options());
  const auto total = at::empty({}, found.options());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto status = reductions::sum_of(context, {x, 0.0, DITORCH_MULTIPLY}, gradients[i],
                                           none.narrow(0, static_cast<int64_t>(i), 1));
    if (status != DITORCH_OK) return status;
  }
  auto status = reductions::sum_all(context, none, total);
  if (status != DITORCH_OK) return status;
  const Formula is_found = {x, 0.0, DITORCH_EQUAL, option(1), 1.0, DITORCH_SELECT};
  status = pointwise::compute(context, is_found, {total, found}, found);
  for (const auto& gradient : gradients) {
    if (status != DITORCH_OK) return status;
    status = pointwise::compute(context, {x, option(1), DITORCH_MULTIPLY}, {gradient, inverse},
                                gradient);
  }
  return status;
}

// _amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval): the scale
// shrinks where something was found, and grows after so many steps without, unless it would be
// infinite.
ditorch_status update_scale(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto &scale = arguments[0].toTensor(), &tracker = arguments[1].toTensor();
  const auto& found = arguments[2].toTensor();
  const auto interval = static_cast<double>(arguments[5].toInt());
  if (!are_scalars({scale, found}) || !is_describable(tracker, scale) || tracker.numel() != 1) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const Step now = argument(0), steps = option(1), is_found = option(2);
  const Formula grown = {now, arguments[3].toDouble(), DITORCH_MULTIPLY};
  const Formula is_finite = grown + grown + Formula{DITORCH_SUBTRACT, 0.0, DITORCH_EQUAL};
  const Formula is_due = {steps, 1.0, DITORCH_ADD, interval, DITORCH_EQUAL};
  const Formula grows = is_due + is_finite + Formula{DITORCH_AND};
  const Formula next = Formula{is_found, now, arguments[4].toDouble(), DITORCH_MULTIPLY} + grows +
                       grown + Formula{now, DITORCH_SELECT, DITORCH_SELECT};
  const Formula starts_anew = Formula{argument(2)} + is_due + Formula{DITORCH_OR};
  const Formula counted = starts_anew + Formula{0.0, steps, 1.0, DITORCH_ADD, DITORCH_SELECT};
  auto status = pointwise::compute(context, next, {scale, tracker, found}, scale);
  if (status != DITORCH_OK) return status;
  results = {scale};
  return pointwise::compute(context, counted, {scale, tracker, found}, tracker);
}

}  // namespace

VendorKernels all_kernels() {
  if (!vendor().operators->sum) return {};
  return {
      {"aten::_amp_foreach_non_finite_check_and_unscale_", check_and_unscale},
      {"aten::_amp_update_scale_", update_scale},
  };
}

}  // namespace ditorch::loss_scale
