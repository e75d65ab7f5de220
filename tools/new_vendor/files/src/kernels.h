/* The chip's kernels. All of them are plain loops, to be REPLACED one by one by launches of your
 * own on context->stream. A kernel that you take away from the table of operators.c, or that says
 * DITORCH_NOT_IMPLEMENTED, is computed by the host. */
#ifndef KERNELS_H
#define KERNELS_H

#include "operators.h"

/* matmul.c */
ditorch_status matmul(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* a,
                      const ditorch_tensor* b);

/* softmax.c */
ditorch_status softmax(const ditorch_context* context, ditorch_tensor* out,
                       const ditorch_tensor* input);
ditorch_status softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                const ditorch_tensor* grad_output, const ditorch_tensor* output);
ditorch_status log_softmax(const ditorch_context* context, ditorch_tensor* out,
                           const ditorch_tensor* input);
ditorch_status log_softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                    const ditorch_tensor* grad_output,
                                    const ditorch_tensor* output);

/* reduce.c */
ditorch_status sum(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* input,
                   int64_t outer, int64_t reduced, int64_t inner);
ditorch_status mean(const ditorch_context* context, ditorch_tensor* out,
                    const ditorch_tensor* input, int64_t outer, int64_t reduced, int64_t inner);

/* map.c */
ditorch_status map(const ditorch_context* context, const ditorch_map* call);
ditorch_status map_list(const ditorch_context* context, const ditorch_map_list* call);

/* philox.c: element `number` under a key, from 0 to below 1. */
double random_number(uint64_t key, int64_t number);

/* indexed.c */
ditorch_status gather(const ditorch_context* context, const ditorch_indexed* call);
ditorch_status scatter_add(const ditorch_context* context, const ditorch_indexed* call);
ditorch_status scatter(const ditorch_context* context, const ditorch_indexed* call);

/* sort.c */
ditorch_status sort(const ditorch_context* context, const ditorch_sort* call);

/* scan.c */
ditorch_status scan(const ditorch_context* context, const ditorch_scan* call);

/* attention.c */
ditorch_status attention(const ditorch_context* context, const ditorch_attention* call);
ditorch_status attention_backward(const ditorch_context* context,
                                  const ditorch_attention_backward* gradients);

/* grouped_matmul.c */
ditorch_status grouped_matmul(const ditorch_context* context, const ditorch_grouped_matmul* call);

/* tensors.c: how tensors are read that are handed over as handles. */
extern const ditorch_tensor_accessors* tensors;
ditorch_status set_accessors(const ditorch_tensor_accessors* accessors);
int64_t elements_of(const ditorch_tensor* tensor);

#endif
