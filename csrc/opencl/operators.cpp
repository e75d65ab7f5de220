// The operator table, as ditorch asks a vendor's library for it.
#include "operators.h"

#include "error.h"
#include "kernels.h"
#include "tensor.h"

namespace opencl {
namespace {

ditorch_status set_accessors(const ditorch_tensor_accessors* accessors) {
  return guarded([&] {
    if (!accessors || accessors->struct_size < sizeof *accessors) {
      fail(DITORCH_INVALID, "set_accessors was given a table that is too short");
    }
    set_tensor_accessors(*accessors);
    return DITORCH_OK;
  });
}

ditorch_operators operator_table() {
  ditorch_operators operators{};
  operators.abi_version = DITORCH_OPERATORS_ABI_VERSION;
  operators.struct_size = sizeof operators;
  operators.set_accessors = set_accessors;
  operators.matmul = matmul;
  operators.softmax = softmax;
  operators.softmax_backward = softmax_backward;
  operators.log_softmax = log_softmax;
  operators.log_softmax_backward = log_softmax_backward;
  operators.layer_norm = layer_norm;
  operators.layer_norm_backward = layer_norm_backward;
  operators.rms_norm = rms_norm;
  operators.rms_norm_backward = rms_norm_backward;
  operators.sum = sum;
  operators.mean = mean;
  operators.map = map;
  operators.map_list = map_list;
  operators.gather = gather;
  operators.scatter_add = scatter_add;
  operators.scatter = scatter;
  operators.sort = sort;
  operators.scan = scan;
  return operators;
}

}  // namespace
}  // namespace opencl

extern "C" [[gnu::visibility("default")]] const ditorch_operators* ditorch_vendor_operators(
    uint32_t abi_version) {
  static const ditorch_operators operators = opencl::operator_table();
  return abi_version == DITORCH_OPERATORS_ABI_VERSION ? &operators : nullptr;
}
