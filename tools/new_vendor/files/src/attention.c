/* Attention, a row of scores at a time: what is kept grows with the length of a sequence alone. */
#include <math.h>
#include <stdlib.h>

#include "chip.h"
#include "elements.h"
#include "kernels.h"

/* The rows of one head. */
typedef struct rows {
  void* data;
  ditorch_dtype dtype;
  int64_t first, row_stride, stride; /* in elements */
} rows;

static rows rows_of(const ditorch_operand* operand, ditorch_dtype dtype, int64_t batch,
                    int64_t head) {
  const int64_t* strides = operand->strides;
  return (rows){.data = chip_bytes(operand->data),
                .dtype = dtype,
                .first = batch * strides[0] + head * strides[1],
                .row_stride = strides[2],
                .stride = strides[3]};
}

static double get(const rows* from, int64_t row, int64_t i) {
  return read_number(from->data, from->dtype,
                     from->first + row * from->row_stride + i * from->stride);
}

static void put(const rows* to, int64_t row, int64_t i, double value) {
  write_number(to->data, to->dtype, to->first + row * to->row_stride + i * to->stride, value);
}

/* What all queries of a head need. */
typedef struct head {
  const ditorch_attention* call;
  rows query, key, value, bias, out;
  int64_t saved; /* where the head's log_sum_exp begins: its first query's row of all */
} head;

static head head_of(const ditorch_attention* call, int64_t batch, int64_t number) {
  const int64_t shared = number / (call->heads / call->kv_heads);
  head found = {.call = call,
                .query = rows_of(&call->query, call->dtype, batch, number),
                .key = rows_of(&call->key, call->dtype, batch, shared),
                .value = rows_of(&call->value, call->dtype, batch, shared),
                .out = rows_of(&call->out, call->dtype, batch, number),
                .saved = (batch * call->heads + number) * call->queries};
  if (call->bias.data) found.bias = rows_of(&call->bias, call->dtype, batch, number);
  return found;
}

static ditorch_dtype dtype_of_sums(const ditorch_attention* call) {
  return call->dtype == DITORCH_FLOAT64 ? DITORCH_FLOAT64 : DITORCH_FLOAT32;
}

/* The keys that a query sees, from `first` to before `end`. */
typedef struct span {
  int64_t first, end;
} span;

/* The rows of a query's document, or all keys where documents are not kept apart. */
static span document_of(const ditorch_attention* call, int64_t query) {
  if (!call->ends) return (span){0, call->keys};
  const int32_t* ends = chip_bytes(call->ends);
  int64_t low = 0, high = call->documents - 1; /* the first document that ends after the query */
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ends[middle] > query) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return (span){low ? ends[low - 1] : 0, ends[low]};
}

static span seen_by(const head* of, int64_t query) {
  const ditorch_attention* call = of->call;
  span seen = document_of(call, query);
  if (call->causal && query + 1 < seen.end) seen.end = query + 1;
  const int64_t oldest = query + 1 - call->window;
  if (call->window && oldest > seen.first) seen.first = oldest < seen.end ? oldest : seen.end;
  return seen;
}

static double score(const head* of, int64_t query, int64_t key) {
  double sum = 0;
  for (int64_t i = 0; i < of->call->size; ++i) {
    sum += get(&of->query, query, i) * get(&of->key, key, i);
  }
  sum *= of->call->scale;
  if (of->call->soft_cap != 0) return of->call->soft_cap * tanh(sum / of->call->soft_cap);
  return of->call->bias.data ? sum + get(&of->bias, query, key) : sum;
}

/* How fast a score rises with the product of its query and key. */
static double slope(const head* of, double score_found) {
  if (of->call->soft_cap == 0) return of->call->scale;
  const double share = score_found / of->call->soft_cap;
  return of->call->scale * (1 - share) * (1 + share);
}

/* What the weight of a key is multiplied by: 0 where it is dropped. */
static double kept(const head* of, int64_t query, int64_t key) {
  const ditorch_attention* call = of->call;
  if (call->dropout == 0) return 1;
  const int64_t number = (of->saved + query) * call->keys + key;
  const float kept_share = (float)(1 - call->dropout);
  const int is_kept = random_number((uint64_t)call->dropout_key, number) < kept_share;
  return is_kept ? 1 / (1 - call->dropout) : 0;
}

static void mix(const head* of, int64_t query, double* powers) {
  const span seen = seen_by(of, query);
  double largest = -INFINITY, sum = 0;
  for (int64_t k = seen.first; k < seen.end; ++k) {
    powers[k] = score(of, query, k);
    if (powers[k] > largest) largest = powers[k];
  }
  const double shift = largest == -INFINITY ? 0 : largest;
  for (int64_t k = seen.first; k < seen.end; ++k) {
    const double power = exp(powers[k] - shift);
    sum += power;
    powers[k] = power * kept(of, query, k);
  }
  for (int64_t i = 0; i < of->call->value_size; ++i) {
    double mixed = 0;
    for (int64_t k = seen.first; k < seen.end; ++k) mixed += powers[k] * get(&of->value, k, i);
    put(&of->out, query, i, sum == 0 ? 0 : mixed / sum);
  }
  write_number(chip_bytes(of->call->log_sum_exp), dtype_of_sums(of->call), of->saved + query,
               sum == 0 ? -INFINITY : shift + log(sum));
}

/* REPLACE these two. */
ditorch_status attention(const ditorch_context* context, const ditorch_attention* call) {
  (void)context;
  if (!is_floating(call->dtype)) return DITORCH_NOT_IMPLEMENTED;
  double* powers = malloc((size_t)call->keys * sizeof *powers);
  if (!powers) return fail(DITORCH_ERROR, "attention: no memory for a row of scores");
  for (int64_t batch = 0; batch < call->batch; ++batch) {
    for (int64_t number = 0; number < call->heads; ++number) {
      const head of = head_of(call, batch, number);
      for (int64_t query = 0; query < call->queries; ++query) mix(&of, query, powers);
    }
  }
  free(powers);
  return DITORCH_OK;
}

/* Gradients while they are summed: of a query, and of the keys and values that heads share. */
typedef struct sums {
  double *query, *key, *value;
} sums;

static void differentiate(const head* of, const rows* grad_out, int64_t query, sums into) {
  const ditorch_attention* call = of->call;
  const double total =
      read_number(chip_bytes(call->log_sum_exp), dtype_of_sums(call), of->saved + query);
  const span seen = total == -INFINITY ? (span){0, 0} : seen_by(of, query);
  double dot = 0; /* what the softmax's gradient takes off */
  for (int64_t i = 0; i < call->value_size; ++i) {
    dot += get(grad_out, query, i) * get(&of->out, query, i);
  }
  for (int64_t i = 0; i < call->size; ++i) into.query[i] = 0;
  for (int64_t k = seen.first; k < seen.end; ++k) {
    const double found = score(of, query, k), power = exp(found - total), left = kept(of, query, k);
    double grad = 0;
    for (int64_t i = 0; i < call->value_size; ++i) {
      const double given = get(grad_out, query, i) * left;
      into.value[k * call->value_size + i] += power * given;
      grad += given * get(&of->value, k, i);
    }
    const double of_score = power * (grad - dot) * slope(of, found);
    for (int64_t i = 0; i < call->size; ++i) {
      into.query[i] += of_score * get(&of->key, k, i);
      into.key[k * call->size + i] += of_score * get(&of->query, query, i);
    }
  }
}

static void write_rows(const rows* to, const double* from, int64_t count, int64_t size) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < size; ++i) put(to, row, i, from[row * size + i]);
  }
}

ditorch_status attention_backward(const ditorch_context* context,
                                  const ditorch_attention_backward* gradients) {
  (void)context;
  const ditorch_attention* call = gradients->forward;
  if (!is_floating(call->dtype)) return DITORCH_NOT_IMPLEMENTED;
  const int64_t of_keys = call->keys * call->size, of_values = call->keys * call->value_size;
  double* scratch = malloc((size_t)(call->size + of_keys + of_values) * sizeof *scratch);
  if (!scratch) return fail(DITORCH_ERROR, "attention_backward: no memory for the sums of a head");
  const sums into = {scratch, scratch + call->size, scratch + call->size + of_keys};
  const int64_t sharing = call->heads / call->kv_heads;
  for (int64_t batch = 0; batch < call->batch; ++batch) {
    for (int64_t shared = 0; shared < call->kv_heads; ++shared) {
      for (int64_t i = 0; i < of_keys + of_values; ++i) into.key[i] = 0;
      for (int64_t number = shared * sharing; number < (shared + 1) * sharing; ++number) {
        const head of = head_of(call, batch, number);
        const rows grad_out = rows_of(&gradients->grad_out, call->dtype, batch, number);
        const rows grad_query = rows_of(&gradients->grad_query, call->dtype, batch, number);
        for (int64_t query = 0; query < call->queries; ++query) {
          differentiate(&of, &grad_out, query, into);
          for (int64_t i = 0; i < call->size; ++i) put(&grad_query, query, i, into.query[i]);
        }
      }
      const rows grad_key = rows_of(&gradients->grad_key, call->dtype, batch, shared);
      const rows grad_value = rows_of(&gradients->grad_value, call->dtype, batch, shared);
      write_rows(&grad_key, into.key, call->keys, call->size);
      write_rows(&grad_value, into.value, call->keys, call->value_size);
    }
  }
  free(scratch);
  return DITORCH_OK;
}
