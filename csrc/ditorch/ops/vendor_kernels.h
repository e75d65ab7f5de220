// The chip's own kernels: ATen operators expressed in the operator ABI.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/vendor.h"

namespace ditorch {

// Computes an operator from its arguments in schema order, on contiguous memory of the chip that
// ditorch allocates first. DITORCH_NOT_IMPLEMENTED leaves the operator, untouched, to the host:
// anything unusual (dtypes, layouts, overlap, wrong shapes) goes there, to torch's own checks.
using VendorKernel = std::function<ditorch_status(const ditorch_context& context,
                                                  c10::ArrayRef<c10::IValue> arguments,
                                                  std::vector<c10::IValue>& results)>;

// By qualified name and overload, such as "aten::add.out".
using VendorKernels = std::map<std::string, VendorKernel>;

// The kernel of an operator, or null if the vendor has none.
VendorKernel find_vendor_kernel(const std::string& qualified_name, const std::string& overload);

// Whether the vendor's library has a kernel for some form of the operator: functional, in place or
// .out. Whether the chip at hand takes part shows only when it is called.
bool vendor_may_compute(std::string_view qualified_name);

// Whether the chip has an rms_norm of its own: asked with a small tensor, as only the call can
// tell. The CPU composes rms_norm from other operators; a chip without the kernel does the same, so
// that a chip that computes with the host's kernels gives the host's gradients bit for bit.
bool vendor_has_rms_norm();

// Hands the vendor the accessors of tensors; called once, before any kernel.
void connect_vendor_kernels();

}  // namespace ditorch
