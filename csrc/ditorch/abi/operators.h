/* The operator ABI: the chip's own kernels. Optional as a whole: a library without
 * `ditorch_vendor_operators` has none, and the host computes everything.
 *
 * The first entries, of one operator each, take tensors as handles; the later ones, of many
 * operators each, take a descriptor. A library made before a descriptor's entry was added goes on
 * working: its smaller `struct_size` says that it lacks the entry.
 *
 * Tensors are opaque handles. ditorch hands the vendor a table of accessors once, at load; a handle
 * is good during the call it is given to. Tensors lie on the context's device; outputs are
 * allocated by ditorch before the call, hold no meaningful values, and overlap no input. No tensor
 * is empty, conjugated or negated in passing, and all are of floating dtypes.
 *
 * What this says of handles does not hold for descriptors, which say themselves what they contain.
 *
 * Every entry may be NULL, and every call may return DITORCH_NOT_IMPLEMENTED (for a dtype, a
 * layout, a size) as long as it has written nothing: ditorch then lets the host compute the
 * operator and counts the fallback. DITORCH_INVALID and DITORCH_ERROR become Python errors with
 * `last_error`'s sentence. The rules of runtime.h hold here too: kernels are submitted to the
 * context's stream and return at once, calls come from any thread, tables grow at the end.
 *
 * A vendor is not asked separately what it supports: the answer would have to be kept in step
 * with the kernels, and whoever has it would still have to call to be sure. Where ditorch has to
 * know beforehand, whether to take an operator apart (elementwise programs, random numbers,
 * attention, grouped products), it calls the entry for one element while it loads the library.
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

/* --- elementwise programs ----------------------------------------------------------------------
 */

/* One step of an elementwise program, on a stack of values: the last pushed is the top. Unary steps
 * replace the top; binary ones replace the two last by one, `a` being the lower and `b` the top.
 * Comparisons, and what is marked so, give 1 or 0. */
typedef enum ditorch_opcode {
  DITORCH_LOAD = 0,     /* push the element of operand `operand` */
  DITORCH_STORE = 1,    /* take the top off and write it to operand `operand` */
  DITORCH_CONSTANT = 2, /* push `value`, or `integer` where the program computes in integers */
  DITORCH_PLACE = 3,    /* push the element's place along the last dimension, from 0 on */
  DITORCH_RANDOM = 4,   /* push a random number from 0 to below 1; not in integers */
  /* unary */
  DITORCH_NEGATE = 16,
  DITORCH_ABS = 17,
  DITORCH_SQRT = 18,
  DITORCH_RSQRT = 19,
  DITORCH_RECIPROCAL = 20,
  DITORCH_EXP = 21,
  DITORCH_LOG = 22,
  DITORCH_SIN = 23,
  DITORCH_COS = 24,
  DITORCH_TANH = 25,
  DITORCH_ERF = 26,
  DITORCH_SIGMOID = 27,
  DITORCH_FLOOR = 28,
  DITORCH_TRUNCATE = 29, /* toward zero */
  DITORCH_NOT = 30,      /* 1 if the top is 0 */
  /* binary */
  DITORCH_ADD = 48,
  DITORCH_SUBTRACT = 49, /* a - b */
  DITORCH_MULTIPLY = 50,
  DITORCH_DIVIDE = 51,  /* a / b; not in integers */
  DITORCH_POWER = 52,   /* a to the power of b; not in integers */
  DITORCH_MINIMUM = 53, /* NaN if either is */
  DITORCH_MAXIMUM = 54,
  DITORCH_LESS = 55,
  DITORCH_LESS_EQUAL = 56,
  DITORCH_EQUAL = 57,
  DITORCH_AND = 58, /* 1 if neither is 0 */
  DITORCH_OR = 59,  /* 1 if one is not 0 */
  /* binary, only in integers */
  DITORCH_FLOOR_DIVIDE = 60, /* a / b rounded down; b is not 0 */
  DITORCH_BIT_AND = 61,
  DITORCH_BIT_OR = 62,
  DITORCH_BIT_XOR = 63,
  DITORCH_SHIFT_LEFT = 64,  /* by b, which is from 0 to 63 */
  DITORCH_SHIFT_RIGHT = 65, /* the sign fills what becomes free */
  /* ternary: a condition, a value and the top */
  DITORCH_SELECT = 80 /* the value if the condition is not 0, else the top */
} ditorch_opcode;

typedef struct ditorch_instruction {
  int32_t opcode;  /* a ditorch_opcode */
  int32_t operand; /* LOAD and STORE */
  double value;    /* CONSTANT */
  int64_t integer; /* CONSTANT; the key of RANDOM, which a program has once at most */
} ditorch_instruction;

/* A strided tensor of a descriptor. */
typedef struct ditorch_operand {
  void* data; /* its first element, on the device */
  ditorch_dtype dtype;
  const int64_t* strides; /* in elements, one for each dimension; zero if expanded */
} ditorch_operand;

#define DITORCH_MAP_OPERANDS 8u      /* at most */
#define DITORCH_MAP_STACK 8u         /* values on the stack, at most */
#define DITORCH_MAP_INSTRUCTIONS 64u /* at most */

/* One program over every element of tensors of one shape. Operands are read before they are
 * written; one that is written overlaps no other but itself (the same tensor twice, as of an
 * operator in place). Dimensions of size 1 and those that could be one are merged already.
 *
 * Values on the stack have the dtype `compute`: FLOAT32, FLOAT64, or INT64 where no operand that is
 * loaded is floating. LOAD converts to it; STORE converts from it: rounded to nearest for floating
 * dtypes, toward zero and modulo the width for integers, 0 or 1 for BOOL.
 *
 * RANDOM is the same on every chip: element n, counted row by row over `sizes`, has word n % 4 of
 * Philox4x32-10 (Salmon et al., SC 2011) at counter n / 4, whose low half is the counter's first
 * word, under the 64-bit key `integer`, whose low half is the key's first word. Its upper 24 bits
 * count in steps of 2^-24. In a list, every call counts from 0. */
typedef struct ditorch_map {
  size_t struct_size;
  ditorch_dtype compute;
  int32_t dimensions;
  int32_t operand_count;
  int32_t instruction_count;
  const int64_t* sizes; /* one for each dimension; none is zero */
  const ditorch_operand* operands;
  const ditorch_instruction* instructions;
} ditorch_map;

/* The same program over lists of dense tensors: the i-th call sees `elements[i]` elements of each
 * operand, from `data[i * operand_count + operand]` on. They lie side by side where the operand's
 * stride is 1; where it is 0, there is one for them all. */
typedef struct ditorch_map_list {
  size_t struct_size;
  ditorch_dtype compute;
  int32_t operand_count;
  int32_t instruction_count;
  int32_t call_count;
  const ditorch_dtype* dtypes; /* one for each operand */
  const int64_t* strides;      /* one for each operand */
  const int64_t* elements;     /* one for each call; none is zero */
  void* const* data;
  const ditorch_instruction* instructions;
} ditorch_map_list;

/* --- elements that an index names --------------------------------------------------------------
 */

/* Elements of a table that another tensor's elements name: of rows, as an embedding has them, or of
 * single elements. `sizes` is the shape over which `dense` and `index` are walked. The element of
 * the table for a place of it is found by `table.strides`, and by the index there, which counts in
 * steps of `table_stride`:
 *
 *   dense[i, j, ...]   and   table[i * strides[0] + j * strides[1] + ... + index * table_stride]
 *
 * `dense` and `table` have one dtype and do not overlap; `index` is INT32 or INT64. An index that
 * is `skipped` names nothing. Any other one that is not from 0 to `table_length` - 1 is refused
 * with DITORCH_NOT_IMPLEMENTED, before anything is written, where the vendor can look at it in
 * time: the host then says which it is. */
typedef struct ditorch_indexed {
  size_t struct_size;
  int32_t dimensions;
  const int64_t* sizes; /* one for each dimension; none is zero */
  ditorch_operand dense;
  ditorch_operand index;
  ditorch_operand table;
  int64_t table_stride; /* in elements */
  int64_t table_length;
  int64_t skipped; /* INT64_MIN where none is */
} ditorch_indexed;

/* --- order and running sums --------------------------------------------------------------------
 */

/* Rows put in order. Each of the `rows` rows of `input` has `length` elements side by side; the
 * first `kept` of them in order go to `values`, and where in the row they were to `places`, whose
 * rows have `kept` elements. Equal elements stay in the order in which they come, and NaN is larger
 * than every number. Nothing is empty or overlaps. */
typedef struct ditorch_sort {
  size_t struct_size;
  ditorch_dtype dtype; /* of input and values */
  int32_t descending;
  int64_t rows;
  int64_t length;
  int64_t kept; /* from 1 to length */
  const void* input;
  void* values;
  int64_t* places;
} ditorch_sort;

/* Sums of all elements up to each: out[o, i, n] = input[o, 0, n] + ... + input[o, i, n], both
 * contiguous and of one dtype. Integers are summed modulo the width. Nothing is empty, and out may
 * be the input itself. */
typedef struct ditorch_scan {
  size_t struct_size;
  ditorch_dtype dtype;
  int64_t outer;
  int64_t length;
  int64_t inner;
  const void* input;
  void* out;
} ditorch_scan;

/* --- products of groups ------------------------------------------------------------------------
 */

/* Products of matrices that lie one after the other, as those of experts do. Group g has what
 * stands from ends[g - 1], or from 0 for the first, to ends[g] - 1: rows of a and out,
 *
 *   out[row] = a[row] @ b[g]                         a [rows, depth], b [groups, depth, columns]
 *
 * or, `along_depth`, columns of a and rows of b, where a group of nothing gives zeros:
 *
 *   out[g] = a[:, of g] @ b[of g]                    a [rows, depth], b [depth, columns]
 *
 * out is [rows, columns], or [groups, rows, columns]. Rows that are of no group are not written.
 * All three are of the floating dtype `dtype`, with a stride for each of their dimensions. `ends`
 * lies on the device, so that the host need not know it: `groups` INT32 side by side, which ascend
 * to at most rows, or depth. No size is zero, and out overlaps neither. */
typedef struct ditorch_grouped_matmul {
  size_t struct_size;
  ditorch_dtype dtype;
  int32_t along_depth;
  int64_t groups, rows, depth, columns;
  ditorch_operand a, b, out;
  const int32_t* ends;
} ditorch_grouped_matmul;

/* --- attention ---------------------------------------------------------------------------------
 */

/* Scaled dot-product attention that keeps no scores (FlashAttention, Dao et al. 2022): memory grows
 * with the length of a sequence, not with its square. Of one head, where query q sees keys 0 to q
 * if `causal`, of these the last `window` alone if that is not 0, and all keys otherwise:
 *
 *   scores[q, k] = capped(scale * query[q] . key[k]) + bias[q, k]
 *   out[q] = sum over k of exp(scores[q, k] - log_sum_exp[q]) * kept[q, k] * value[k]
 *   log_sum_exp[q] = log(sum over k of exp(scores[q, k]))
 *
 * A query that sees no key has the output 0. query and out are [batch, heads, queries, ..], key and
 * value [batch, kv_heads, keys, ..]; kv_heads divides heads, and heads next to each other share a
 * kv head. Rows of query and key have `size` elements, those of value and out `value_size`. `bias`
 * is [batch, heads, queries, keys]; its data is NULL where there is none. All are of the floating
 * dtype `dtype`, with four strides each; log_sum_exp is contiguous, [batch, heads, queries], and
 * FLOAT32, or FLOAT64 where `dtype` is. No size is zero, and outputs overlap nothing.
 *
 * `ends`, if it is not NULL, keeps documents apart that lie one after the other, as sequences of
 * their own: document d has the rows from ends[d - 1], or from 0 for the first, to ends[d] - 1, of
 * queries and of keys alike. It lies on the device: `documents` INT32 side by side, which ascend to
 * `queries`; some may have no rows. batch is then 1, there are as many keys, and there is no bias.
 *
 * capped(x) is soft_cap * tanh(x / soft_cap), and x itself where `soft_cap` is 0; where it is not,
 * there is no bias. kept is 1 where `dropout` is 0. Otherwise it is 1 / (1 - dropout) where RANDOM,
 * of a map over [batch, heads, queries, keys] under `dropout_key`, is below 1 - dropout, rounded to
 * FLOAT32, and 0 elsewhere. No mask is kept: the backward, which is told the same key, finds each
 * element of it by its number, as every other chip does. */
typedef struct ditorch_attention {
  size_t struct_size;
  ditorch_dtype dtype;
  int32_t causal;
  double scale;
  int64_t batch, heads, kv_heads, queries, keys, size, value_size;
  ditorch_operand query, key, value, bias;
  ditorch_operand out;
  void* log_sum_exp;
  /* since the table has attention_struct_size */
  int64_t window; /* 0, or at least 1 where causal */
  int64_t documents;
  const int32_t* ends;
  /* since the table may say that it has these */
  double soft_cap; /* 0, or more */
  double dropout;  /* from 0 to below 1 */
  int64_t dropout_key;
} ditorch_attention;

/* Its gradients, which are of `dtype` and have four strides each. `forward` is the call whose out
 * and log_sum_exp are now given. */
typedef struct ditorch_attention_backward {
  size_t struct_size;
  const ditorch_attention* forward;
  ditorch_operand grad_out;
  ditorch_operand grad_query, grad_key, grad_value;
} ditorch_attention_backward;

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

  /* Elementwise operators: arithmetic, comparisons, where, casts, fills, strided copies,
   * activations and their gradients. */
  ditorch_status (*map)(const ditorch_context* context, const ditorch_map* call);
  /* Steps of optimizers and of gradient clipping. A step of AdamW is one program over its tensors,
   * or two with a loss scale, beside one over a few scalars, so that it has no entry of its own. */
  ditorch_status (*map_list)(const ditorch_context* context, const ditorch_map_list* call);

  /* dense = table: embeddings, index_select, gather, the loss of a class. Zero where the index is
   * skipped. Any dtype. */
  ditorch_status (*gather)(const ditorch_context* context, const ditorch_indexed* call);
  /* table += dense: their gradients. Several places may name one element, whose sum is rounded
   * once. Floating dtypes. */
  ditorch_status (*scatter_add)(const ditorch_context* context, const ditorch_indexed* call);
  /* table = dense, where the index names it; of several places that name one element, any one.
   * Any dtype. */
  ditorch_status (*scatter)(const ditorch_context* context, const ditorch_indexed* call);

  /* sort and topk. Any dtype. */
  ditorch_status (*sort)(const ditorch_context* context, const ditorch_sort* call);
  /* cumsum. Any dtype but BOOL. */
  ditorch_status (*scan)(const ditorch_context* context, const ditorch_scan* call);

  /* scaled_dot_product_attention, FlashAttention by its name in ATen, and their gradients: both, or
   * none. */
  ditorch_status (*attention)(const ditorch_context* context, const ditorch_attention* call);
  ditorch_status (*attention_backward)(const ditorch_context* context,
                                       const ditorch_attention_backward* call);

  /* _grouped_mm and its gradients. */
  ditorch_status (*grouped_matmul)(const ditorch_context* context,
                                   const ditorch_grouped_matmul* call);

  /* Up to where the vendor reads ditorch_attention: it is asked for nothing that a field beyond
   * would say. sizeof(ditorch_attention) is all of it, offsetof(ditorch_attention, soft_cap) what
   * there is without soft cap and dropout. */
  size_t attention_struct_size;
} ditorch_operators;

/* The library's table, which lives as long as the process, or NULL if it does not speak
 * `abi_version`. */
const ditorch_operators* ditorch_vendor_operators(uint32_t abi_version);
typedef const ditorch_operators* (*ditorch_vendor_operators_fn)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
#endif
