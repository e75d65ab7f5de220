#include "ops/concatenation.h"

#include <ATen/core/Tensor.h>

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
  const bool is_full = out.numel() > 0 && first == out.size(dim);
  return is_full ? DITORCH_OK : DITORCH_NOT_IMPLEMENTED;
}

}  // namespace

VendorKernels all_kernels() { return {{"aten::cat.out", cat_out}}; }

}  // namespace ditorch::concatenation
