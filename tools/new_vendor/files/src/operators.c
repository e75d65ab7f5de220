/* The table of the chip's kernels. What is not in it the host computes, and counts
 * (ditorch.fallback_counts()). */
#include "operators.h"

#include "kernels.h"

/* Next candidates, in the order in which they pay off in training: rms_norm, layer_norm and their
 * backward kernels. */
static const ditorch_operators operators = {
    .abi_version = DITORCH_OPERATORS_ABI_VERSION,
    .struct_size = sizeof(ditorch_operators),
    .set_accessors = set_accessors,
    .matmul = matmul,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .log_softmax = log_softmax,
    .log_softmax_backward = log_softmax_backward,
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

__attribute__((visibility("default"))) const ditorch_operators* ditorch_vendor_operators(
    uint32_t abi_version) {
  return abi_version == DITORCH_OPERATORS_ABI_VERSION ? &operators : NULL;
}
