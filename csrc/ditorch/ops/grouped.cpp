#include "ops/grouped.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "ops/optional_tensor.h"
#include "ops/tensors.h"

namespace ditorch::grouped {
namespace {

// _grouped_mm(self, mat2, offs, bias, out_dtype)
ditorch_status grouped_mm(const ditorch_context& context, c10::ArrayRef<c10::IValue> arguments,
                          std::vector<c10::IValue>& results) {
  const auto& a = arguments[0].toTensor();
  const auto& b = arguments[1].toTensor();
  const auto ends = optional_tensor(arguments[2]);
  const bool keeps_dtype = arguments[4].isNone() || arguments[4].toScalarType() == a.scalar_type();
  if (!are_plain({a, b}) || a.dim() != 2 || (b.dim() != 2 && b.dim() != 3) ||
      a.scalar_type() != b.scalar_type() || a.size(1) != b.size(-2) || !keeps_dtype ||
      optional_tensor(arguments[3]).defined() || !ends.defined() ||
      ends.scalar_type() != c10::kInt || ends.dim() != 1 || ends.device() != a.device() ||
      ends.numel() == 0 || (b.dim() == 3 && ends.size(0) != b.size(0))) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const bool along_depth = b.dim() == 2;
  const auto places = ends.contiguous();
  const auto out = along_depth ? at::empty({ends.size(0), a.size(0), b.size(1)}, a.options())
                               : at::empty({a.size(0), b.size(2)}, a.options());
  const ditorch_grouped_matmul call{sizeof(call),
                                    abi_dtype(a.scalar_type()),
                                    along_depth,
                                    ends.size(0),
                                    a.size(0),
                                    a.size(1),
                                    b.size(-1),
                                    operand_of(a),
                                    operand_of(b),
                                    operand_of(out),
                                    places.const_data_ptr<int32_t>()};
  results = {out};
  return vendor().operators->grouped_matmul(&context, &call);
}

}  // namespace

bool vendor_has() { return vendor().operators && vendor().operators->grouped_matmul; }

VendorKernels all_kernels() { return {{"aten::_grouped_mm", grouped_mm}}; }

}  // namespace ditorch::grouped
