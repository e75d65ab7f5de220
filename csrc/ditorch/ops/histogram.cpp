#include "ops/histogram.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "ops/formula.h"
#include "ops/indexed.h"
#include "ops/pointwise.h"
#include "ops/status.h"

namespace ditorch::histogram {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

constexpr int64_t kMostCounted = 1 << 24;  // one by one, in float32
constexpr int64_t kNowhere = -1;           // the bin of what lies outside of all bins

// histc(self, bins, min, max) of integers, between bounds that are given and whole.
ditorch_status histc(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto bins = arguments[1].toInt();
  const auto lowest = arguments[2].toScalar(), highest = arguments[3].toScalar();
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false) || self.numel() == 0 ||
      self.numel() > kMostCounted || bins < 1 || !lowest.isIntegral(false) ||
      !highest.isIntegral(false) || lowest.toLong() >= highest.toLong()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto low = static_cast<double>(lowest.toLong());
  const auto high = static_cast<double>(highest.toLong());
  const auto count = static_cast<double>(bins);
  const Step a = argument(0);
  const Formula is_outside = {a, low, DITORCH_LESS, high, a, DITORCH_LESS, DITORCH_OR};
  const Formula bin = {a,
                       low,
                       DITORCH_SUBTRACT,
                       count,
                       DITORCH_MULTIPLY,
                       high - low,
                       DITORCH_FLOOR_DIVIDE,
                       count - 1.0,
                       DITORCH_MINIMUM};
  const Formula bin_of =
      is_outside + Formula{static_cast<double>(kNowhere)} + bin + Formula{DITORCH_SELECT};
  const auto flat = self.reshape({-1});
  const auto bins_of = at::empty(flat.sizes(), self.options().dtype(c10::kLong));
  const auto one = at::empty({1}, self.options().dtype(c10::kFloat));
  const auto counts = at::empty({bins}, one.options());
  const auto out = at::empty({bins}, self.options());
  results = {out};
  return Status()
      .then([&] { return pointwise::compute(context, bin_of, {flat}, bins_of); })
      .then([&] { return pointwise::compute(context, {1.0}, {}, one); })
      .then([&] { return pointwise::compute(context, {0.0}, {}, counts); })
      .then([&] {
        const auto ones = one.expand(flat.sizes());
        return indexed::scatter_add(context, ones, bins_of, counts, 0, kNowhere);
      })
      .then([&] { return pointwise::compute(context, {a}, {counts}, out); })
      .get();
}

}  // namespace

VendorKernels all_kernels() { return {{"aten::histc", histc}}; }

}  // namespace ditorch::histogram
