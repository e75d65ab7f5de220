#include "ops/class_loss.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "ops/formula.h"
#include "ops/indexed.h"
#include "ops/optional_tensor.h"
#include "ops/pointwise.h"
#include "ops/reductions.h"
#include "ops/status.h"
#include "ops/tensors.h"

namespace ditorch::class_loss {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

const Step a = argument(0), b = argument(1);

// Chances as [rows, classes], one row or many, and a class for each row; classes of equal weight,
// and a loss that is one number.
bool is_taken(const at::Tensor& chances, const at::Tensor& target, const c10::IValue& weight,
              int64_t reduction) {
  return chances.is_floating_point() && chances.dim() == 2 && target.dim() == 1 &&
         target.size(0) == chances.size(0) && chances.numel() > 0 &&
         !optional_tensor(weight).defined() && reduction != at::Reduction::None;
}

// nll_loss_forward.output(self, target, weight, reduction, ignore_index, output, total_weight)
ditorch_status forward(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& chances = arguments[0].toTensor();
  const auto& target = arguments[1].toTensor();
  const auto reduction = arguments[3].toInt(), ignored = arguments[4].toInt();
  const auto &output = arguments[5].toTensor(), &total_weight = arguments[6].toTensor();
  if (!is_taken(chances, target, arguments[2], reduction)) return DITORCH_NOT_IMPLEMENTED;
  const auto wide = chances.options().dtype(wide_dtype(chances));
  const auto rows = target.size(0);
  const auto picked = at::empty({rows, 1}, chances.options());
  const auto losses = at::empty({rows, 1}, wide), counted = at::empty({rows}, wide);
  const auto sum = at::empty({}, wide), count = at::empty({}, wide);
  const Formula is_counted = {a, static_cast<double>(ignored), DITORCH_EQUAL, DITORCH_NOT};
  const Formula mean = {a, b, DITORCH_DIVIDE};
  results = {output, total_weight};
  return Status()
      .then([&] {
        return indexed::gather(context, picked, target.unsqueeze(1), chances, 1, ignored);
      })
      .then([&] { return pointwise::compute(context, {a, DITORCH_NEGATE}, {picked}, losses); })
      .then([&] { return pointwise::compute(context, is_counted, {target}, counted); })
      .then([&] { return reductions::sum_all(context, losses, sum); })
      .then([&] { return reductions::sum_all(context, counted, count); })
      .then([&] { return pointwise::compute(context, {a}, {count}, total_weight); })
      .then([&] {
        const Formula loss = reduction == at::Reduction::Mean ? mean : Formula{a};
        return pointwise::compute(context, loss, {sum, count}, output);
      })
      .get();
}

// nll_loss_backward.grad_input(grad_output, self, target, weight, reduction, ignore_index,
//                              total_weight, grad_input)
ditorch_status backward(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& grad_output = arguments[0].toTensor();
  const auto& chances = arguments[1].toTensor();
  const auto& target = arguments[2].toTensor();
  const auto reduction = arguments[4].toInt(), ignored = arguments[5].toInt();
  const auto &total_weight = arguments[6].toTensor(), &grad_input = arguments[7].toTensor();
  if (!is_taken(chances, target, arguments[3], reduction) || grad_output.numel() != 1 ||
      grad_input.sizes() != chances.sizes()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto of_rows = at::empty({target.size(0), 1}, chances.options());
  const Formula of_sum = {a, DITORCH_NEGATE};
  const Formula of_mean = {a, b, DITORCH_DIVIDE, DITORCH_NEGATE};
  results = {grad_input};
  return Status()
      .then([&] {
        const auto& formula = reduction == at::Reduction::Mean ? of_mean : of_sum;
        return pointwise::compute(context, formula, {grad_output, total_weight}, of_rows);
      })
      .then([&] { return pointwise::compute(context, {0.0}, {}, grad_input); })
      .then([&] {
        return indexed::scatter_add(context, of_rows, target.unsqueeze(1), grad_input, 1, ignored);
      })
      .get();
}

}  // namespace

VendorKernels all_kernels() {
  return {
      {"aten::nll_loss_forward.output", forward},
      {"aten::nll_loss_backward.grad_input", backward},
  };
}

}  // namespace ditorch::class_loss
