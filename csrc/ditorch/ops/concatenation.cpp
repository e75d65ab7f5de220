#include "ops/concatenation.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "ops/map.h"
#include "ops/tensors.h"

namespace ditorch::concatenation {
namespace {

// cat.out(tensors, dim, out)
ditorch_status cat_out(const ditorch_context& context, c10::ArrayRef<c10::IValue> arguments,
                       std::vector<c10::IValue>& results) {
  const auto tensors = arguments[0].toTensorVector();
  const auto& out = arguments[2].toTensor();
  const auto dim = from_front(arguments[1].toInt(), out);
  results = {out};
  int64_t first = 0;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;  // torch takes empty vectors whatever the others' shape
    if (tensor.dim() != out.dim() || tensor.is_alias_of(out) || dim < 0 || dim >= out.dim() ||
        first + tensor.size(dim) > out.size(dim)) {
      return DITORCH_NOT_IMPLEMENTED;
    }
    const auto part = out.narrow(dim, first, tensor.size(dim));
    if (part.sizes() != tensor.sizes()) return DITORCH_NOT_IMPLEMENTED;
    const auto status = map_copy(context, part, tensor);
    if (status != DITORCH_OK) return status;
    first += tensor.size(dim);
  }
  return first == out.size(dim) ? DITORCH_OK : DITORCH_NOT_IMPLEMENTED;
}

// roll(self, shifts, dims), of one dimension: its last places come before the first ones. The
// result lies in memory as torch's does, which joins the two parts.
ditorch_status roll(const ditorch_context& context, c10::ArrayRef<c10::IValue> arguments,
                    std::vector<c10::IValue>& results) {
  const auto& self = arguments[0].toTensor();
  const auto shifts = arguments[1].toIntVector(), dims = arguments[2].toIntVector();
  if (!is_describable(self, self) || self.numel() == 0 || shifts.size() != 1 || dims.size() != 1) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto dim = from_front(dims[0], self);
  if (dim < 0 || dim >= self.dim()) return DITORCH_NOT_IMPLEMENTED;
  const auto length = self.size(dim);
  const auto count = (shifts[0] % length + length) % length;  // that come before the others
  const auto before = self.narrow(dim, length - count, count);
  const auto after = self.narrow(dim, 0, length - count);
  const auto format = after.suggest_memory_format();
  const bool alike = before.suggest_memory_format() == format;
  const auto out =
      at::empty(self.sizes(), self.options(), alike ? format : at::MemoryFormat::Contiguous);
  results = {out};
  const auto status = map_copy(context, out.narrow(dim, count, length - count), after);
  if (status != DITORCH_OK || count == 0) return status;
  return map_copy(context, out.narrow(dim, 0, count), before);
}

}  // namespace

VendorKernels all_kernels() {
  return {
      {"aten::cat.out", cat_out},
      {"aten::roll", roll},
  };
}

}  // namespace ditorch::concatenation
