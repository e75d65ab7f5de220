/* The operator ABI: the chip's own kernels. Optional as a whole: a library without
 * `ditorch_vendor_operators` has none, and the host computes everything.
 *
 * Tensors are opaque handles. ditorch hands the vendor a table of accessors once, at load; a handle
 * is good during the call it is given to. Tensors lie on the context's device; outputs are
 * allocated by ditorch before the call, hold no meaningful values, and overlap no input. No tensor
 * is empty, conjugated or negated in passing, and all are of floating dtypes.
 *
 * Every entry may be NULL, and every call may return DITORCH_NOT_IMPLEMENTED (for a dtype, a
 * layout, a size) as long as it has written nothing: ditorch then lets the host compute the
 * operator and counts the fallback. DITORCH_INVALID and DITORCH_ERROR become Python errors with
 * `last_error`'s sentence. The rules of runtime.h hold here too: kernels are submitted to the
 * context's stream and return at once, calls come from any thread, tables grow at the end.
 *
 * Results are rounded to the output's dtype; sums should be accumulated in float32 or wider. What a
 * kernel may differ from the reference by is the verdict of `ditorch-align`, not of this file. */
#ifndef DITORCH_ABI_OPERATORS_H
#define DITORCH_ABI_OPERATORS_H

#include "runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DITORCH_OPERATORS_ABI_VERSION 1u

typedef struct ditorch_tensor ditorch_tensor; /* ditorch's own; NULL is an absent argument */

/* How the vendor reads a tensor. Callable from any thread during an operator. */
typedef struct ditorch_tensor_accessors {
  size_t struct_size;
  void* (*data)(const ditorch_tensor* tensor); /* its first element, on the device */
  ditorch_dtype (*dtype)(const ditorch_tensor* tensor);
  int32_t (*dimensions)(const ditorch_tensor* tensor);
  const int64_t* (*sizes)(const ditorch_tensor* tensor);   /* one for each dimension */
  const int64_t* (*strides)(const ditorch_tensor* tensor); /* in elements, zero if expanded */
} ditorch_tensor_accessors;

/* Where an operator runs. */
typedef struct ditorch_context {
  size_t struct_size;
  int32_t device;
  ditorch_stream* stream; /* NULL is the default stream */
} ditorch_context;

typedef struct ditorch_operators {
  uint32_t abi_version; /* DITORCH_OPERATORS_ABI_VERSION */
  size_t struct_size;   /* sizeof(ditorch_operators) as the vendor compiled it */

  /* Called once before any operator; the accessors live as long as the process. NULL only if every
   * operator is. */
  ditorch_status (*set_accessors)(const ditorch_tensor_accessors* accessors);

  /* out[b,m,n] = a[b,m,k] @ b[b,k,n], or two-dimensional tensors without b. All of one dtype, of
   * any strides: transposed operands arrive as they are. */
  ditorch_status (*matmul)(const ditorch_context* context, ditorch_tensor* out,
                           const ditorch_tensor* a, const ditorch_tensor* b);

  /* Softmax over the last dimension; contiguous, of one shape and dtype. */
  ditorch_status (*softmax)(const ditorch_context* context, ditorch_tensor* out,
                            const ditorch_tensor* input);
  /* grad_input = output * (grad_output - sum(grad_output * output)) */
  ditorch_status (*softmax_backward)(const ditorch_context* context, ditorch_tensor* grad_input,
                                     const ditorch_tensor* grad_output,
                                     const ditorch_tensor* output);
  ditorch_status (*log_softmax)(const ditorch_context* context, ditorch_tensor* out,
                                const ditorch_tensor* input);
  /* grad_input = grad_output - exp(output) * sum(grad_output) */
  ditorch_status (*log_softmax_backward)(const ditorch_context* context, ditorch_tensor* grad_input,
                                         const ditorch_tensor* grad_output,
                                         const ditorch_tensor* output);

  /* Normalisation over the last `normalized` elements of a contiguous input seen as [rows,
   * normalized]. weight and bias have `normalized` elements and may be NULL. mean and
   * rstd = 1 / sqrt(variance + eps) have one element for each row, for the backward pass.
   * Gradients that are not wanted are NULL. */
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
  /* rstd = 1 / sqrt(mean(input^2) + eps); no mean is taken off. */
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

/* The library's table, which lives as long as the process, or NULL if it does not speak
 * `abi_version`. */
const ditorch_operators* ditorch_vendor_operators(uint32_t abi_version);
typedef const ditorch_operators* (*ditorch_vendor_operators_fn)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
#endif
