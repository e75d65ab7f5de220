/* The operator ABI: the chip's own kernels.
 *
 * Tensors are opaque handles. ditorch hands the vendor a table of accessors once, at load;
 * outputs are allocated by ditorch before the call. Any function pointer may be NULL and any
 * call may return DITORCH_NOT_IMPLEMENTED (for a dtype, a layout, a size): ditorch then runs the
 * host's kernel and counts the fallback. Inputs may be non-contiguous unless stated otherwise. */
#ifndef DITORCH_ABI_OPERATORS_H
#define DITORCH_ABI_OPERATORS_H

#include "runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DITORCH_OPERATORS_ABI_VERSION 1u

typedef struct ditorch_tensor ditorch_tensor;

typedef struct ditorch_tensor_accessors {
  size_t struct_size;
  void* (*data)(const ditorch_tensor* tensor);
  ditorch_dtype (*dtype)(const ditorch_tensor* tensor);
  int32_t (*dimensions)(const ditorch_tensor* tensor);
  const int64_t* (*sizes)(const ditorch_tensor* tensor);
  const int64_t* (*strides)(const ditorch_tensor* tensor); /* in elements */
} ditorch_tensor_accessors;

typedef struct ditorch_context {
  size_t struct_size;
  int32_t device;
  ditorch_stream* stream;
} ditorch_context;

typedef struct ditorch_operators {
  uint32_t abi_version; /* DITORCH_OPERATORS_ABI_VERSION */
  size_t struct_size;

  /* Called once before any operator. */
  ditorch_status (*set_accessors)(const ditorch_tensor_accessors* accessors);

  /* out[b,m,n] = a[b,m,k] @ b[b,k,n]; two-dimensional tensors for b = 1. Any strides. */
  ditorch_status (*matmul)(const ditorch_context* context, ditorch_tensor* out,
                           const ditorch_tensor* a, const ditorch_tensor* b);

  /* Softmax over the last dimension; contiguous. grad_input = softmax backward. */
  ditorch_status (*softmax)(const ditorch_context* context, ditorch_tensor* out,
                            const ditorch_tensor* input);
  ditorch_status (*softmax_backward)(const ditorch_context* context, ditorch_tensor* grad_input,
                                     const ditorch_tensor* grad_output,
                                     const ditorch_tensor* output);
  ditorch_status (*log_softmax)(const ditorch_context* context, ditorch_tensor* out,
                                const ditorch_tensor* input);
  ditorch_status (*log_softmax_backward)(const ditorch_context* context, ditorch_tensor* grad_input,
                                         const ditorch_tensor* grad_output,
                                         const ditorch_tensor* output);

  /* Normalisation over the last `normalized` elements of a contiguous input seen as [rows,
   * normalized]; weight and bias may be NULL. mean and rstd have one element per row. */
  ditorch_status (*layer_norm)(const ditorch_context* context, ditorch_tensor* out,
                               ditorch_tensor* mean, ditorch_tensor* rstd,
                               const ditorch_tensor* input, const ditorch_tensor* weight,
                               const ditorch_tensor* bias, int64_t normalized, double eps);
  ditorch_status (*layer_norm_backward)(const ditorch_context* context, ditorch_tensor* grad_input,
                                        ditorch_tensor* grad_weight, ditorch_tensor* grad_bias,
                                        const ditorch_tensor* grad_output,
                                        const ditorch_tensor* input, const ditorch_tensor* mean,
                                        const ditorch_tensor* rstd, const ditorch_tensor* weight,
                                        int64_t normalized);
  ditorch_status (*rms_norm)(const ditorch_context* context, ditorch_tensor* out,
                             ditorch_tensor* rstd, const ditorch_tensor* input,
                             const ditorch_tensor* weight, int64_t normalized, double eps);
  ditorch_status (*rms_norm_backward)(const ditorch_context* context, ditorch_tensor* grad_input,
                                      ditorch_tensor* grad_weight,
                                      const ditorch_tensor* grad_output,
                                      const ditorch_tensor* input, const ditorch_tensor* rstd,
                                      const ditorch_tensor* weight, int64_t normalized);

  /* Reduction of a contiguous input seen as [outer, reduced, inner] to [outer, inner]. */
  ditorch_status (*sum)(const ditorch_context* context, ditorch_tensor* out,
                        const ditorch_tensor* input, int64_t outer, int64_t reduced, int64_t inner);
  ditorch_status (*mean)(const ditorch_context* context, ditorch_tensor* out,
                         const ditorch_tensor* input, int64_t outer, int64_t reduced,
                         int64_t inner);
} ditorch_operators;

/* Returns NULL when the library does not speak `abi_version`. */
const ditorch_operators* ditorch_vendor_operators(uint32_t abi_version);
typedef const ditorch_operators* (*ditorch_vendor_operators_fn)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
#endif
