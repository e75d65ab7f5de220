// The operator table, as ditorch asks a vendor's library for it.
#include "operators.h"

#include "error.h"
#include "kernels.h"
#include "tensor.h"

namespace emuchip {
namespace {

ditorch_status set_accessors(const ditorch_tensor_accessors* accessors) {
  if (!accessors || accessors->struct_size < sizeof *accessors) {
    return fail(DITORCH_INVALID, "set_accessors: expected a table of at least %zu bytes",
                sizeof *accessors);
  }
  set_tensor_accessors(*accessors);
  return DITORCH_OK;
}

constexpr ditorch_operators kOperators = {
    .abi_version = DITORCH_OPERATORS_ABI_VERSION,
    .struct_size = sizeof(ditorch_operators),
    .set_accessors = set_accessors,
    .matmul = matmul,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .log_softmax = log_softmax,
    .log_softmax_backward = log_softmax_backward,
    .layer_norm = layer_norm,
    .layer_norm_backward = layer_norm_backward,
    .rms_norm = rms_norm,
    .rms_norm_backward = rms_norm_backward,
    .sum = sum,
    .mean = mean,
    .map = map,
    .map_list = map_list,
    .gather = gather,
    .scatter_add = scatter_add,
    .scatter = scatter,
    .sort = sort,
    .scan = scan,
    .attention = attention,
    .attention_backward = attention_backward,
    .grouped_matmul = grouped_matmul,
    .attention_struct_size = sizeof(ditorch_attention),
};

}  // namespace
}  // namespace emuchip

extern "C" [[gnu::visibility("default")]] const ditorch_operators* ditorch_vendor_operators(
    uint32_t abi_version) {
  return abi_version == DITORCH_OPERATORS_ABI_VERSION ? &emuchip::kOperators : nullptr;
}
