// The functions of the operator table, one group a file. What they do is said in the ABI.
#pragma once

#include "operators.h"

namespace emuchip {

// matmul.cpp
ditorch_status matmul(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* a,
                      const ditorch_tensor* b);

// softmax.cpp
ditorch_status softmax(const ditorch_context* context, ditorch_tensor* out,
                       const ditorch_tensor* input);
ditorch_status softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                const ditorch_tensor* grad_output, const ditorch_tensor* output);
ditorch_status log_softmax(const ditorch_context* context, ditorch_tensor* out,
                           const ditorch_tensor* input);
ditorch_status log_softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                    const ditorch_tensor* grad_output,
                                    const ditorch_tensor* output);

// layer_norm.cpp
ditorch_status layer_norm(const ditorch_context* context, ditorch_tensor* out, ditorch_tensor* mean,
                          ditorch_tensor* rstd, const ditorch_tensor* input,
                          const ditorch_tensor* weight, const ditorch_tensor* bias,
                          int64_t normalized, double eps);
ditorch_status layer_norm_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                   ditorch_tensor* grad_weight, ditorch_tensor* grad_bias,
                                   const ditorch_tensor* grad_output, const ditorch_tensor* input,
                                   const ditorch_tensor* mean, const ditorch_tensor* rstd,
                                   const ditorch_tensor* weight, int64_t normalized);

// rms_norm.cpp
ditorch_status rms_norm(const ditorch_context* context, ditorch_tensor* out, ditorch_tensor* rstd,
                        const ditorch_tensor* input, const ditorch_tensor* weight,
                        int64_t normalized, double eps);
ditorch_status rms_norm_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                 ditorch_tensor* grad_weight, const ditorch_tensor* grad_output,
                                 const ditorch_tensor* input, const ditorch_tensor* rstd,
                                 const ditorch_tensor* weight, int64_t normalized);

// reduce.cpp
ditorch_status sum(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* input,
                   int64_t outer, int64_t reduced, int64_t inner);
ditorch_status mean(const ditorch_context* context, ditorch_tensor* out,
                    const ditorch_tensor* input, int64_t outer, int64_t reduced, int64_t inner);

// map.cpp
ditorch_status map(const ditorch_context* context, const ditorch_map* call);
ditorch_status map_list(const ditorch_context* context, const ditorch_map_list* call);

// indexed.cpp
ditorch_status gather(const ditorch_context* context, const ditorch_indexed* call);
ditorch_status scatter_add(const ditorch_context* context, const ditorch_indexed* call);
ditorch_status scatter(const ditorch_context* context, const ditorch_indexed* call);

// sort.cpp
ditorch_status sort(const ditorch_context* context, const ditorch_sort* call);

// scan.cpp
ditorch_status scan(const ditorch_context* context, const ditorch_scan* call);

// attention.cpp
ditorch_status attention(const ditorch_context* context, const ditorch_attention* call);
ditorch_status attention_backward(const ditorch_context* context,
                                  const ditorch_attention_backward* call);

// grouped_matmul.cpp
ditorch_status grouped_matmul(const ditorch_context* context, const ditorch_grouped_matmul* call);

}  // namespace emuchip
