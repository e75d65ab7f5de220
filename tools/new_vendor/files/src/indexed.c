/* Elements of a table that an index names. */
#include <stdlib.h>
#include <string.h>

#include "chip.h"
#include "elements.h"
#include "kernels.h"

static place first_place(const ditorch_indexed* call) {
  return (place){.dimensions = call->dimensions, .sizes = call->sizes};
}

static int64_t index_at(const ditorch_indexed* call, const place* at) {
  return read_integer(chip_bytes(call->index.data), call->index.dtype,
                      offset_of(at, call->index.strides));
}

static int64_t dense_offset(const ditorch_indexed* call, const place* at) {
  return offset_of(at, call->dense.strides);
}

static int64_t table_offset(const ditorch_indexed* call, const place* at, int64_t index) {
  return offset_of(at, call->table.strides) + index * call->table_stride;
}

/* Looked at before anything is written. A chip whose index is not there yet when the kernel is
 * launched may leave the question to the kernel, which then reads and writes nothing for it. */
static int is_every_index_good(const ditorch_indexed* call) {
  place at = first_place(call);
  do {
    const int64_t index = index_at(call, &at);
    if (index != call->skipped && (index < 0 || index >= call->table_length)) return 0;
  } while (next_place(&at));
  return 1;
}

/* REPLACE these three. */
ditorch_status gather(const ditorch_context* context, const ditorch_indexed* call) {
  (void)context;
  if (!is_known(call->dense.dtype) || !is_every_index_good(call)) return DITORCH_NOT_IMPLEMENTED;
  const int64_t bytes = bytes_of(call->dense.dtype);
  char* dense = chip_bytes(call->dense.data);
  const char* table = chip_bytes(call->table.data);
  place at = first_place(call);
  do {
    const int64_t index = index_at(call, &at);
    char* to = dense + dense_offset(call, &at) * bytes;
    if (index == call->skipped) {
      memset(to, 0, (size_t)bytes);
    } else {
      memcpy(to, table + table_offset(call, &at, index) * bytes, (size_t)bytes);
    }
  } while (next_place(&at));
  return DITORCH_OK;
}

ditorch_status scatter(const ditorch_context* context, const ditorch_indexed* call) {
  (void)context;
  if (!is_known(call->dense.dtype) || !is_every_index_good(call)) return DITORCH_NOT_IMPLEMENTED;
  const int64_t bytes = bytes_of(call->dense.dtype);
  const char* dense = chip_bytes(call->dense.data);
  char* table = chip_bytes(call->table.data);
  place at = first_place(call);
  do {
    const int64_t index = index_at(call, &at);
    if (index == call->skipped) continue;
    memcpy(table + table_offset(call, &at, index) * bytes, dense + dense_offset(call, &at) * bytes,
           (size_t)bytes);
  } while (next_place(&at));
  return DITORCH_OK;
}

/* An element of dense and the one of the table that it is added to. */
typedef struct addition {
  int64_t to, from;
} addition;

static int compare_additions(const void* left, const void* right) {
  const addition *a = left, *b = right;
  if (a->to != b->to) return a->to < b->to ? -1 : 1;
  return (a->from > b->from) - (a->from < b->from);
}

/* What is added to one element is brought together first, so that its sum is rounded once. */
ditorch_status scatter_add(const ditorch_context* context, const ditorch_indexed* call) {
  (void)context;
  const ditorch_dtype dtype = call->dense.dtype;
  if (!is_floating(dtype) || !is_every_index_good(call)) return DITORCH_NOT_IMPLEMENTED;
  int64_t count = 1;
  for (int32_t d = 0; d < call->dimensions; ++d) count *= call->sizes[d];
  addition* additions = malloc((size_t)count * sizeof *additions);
  if (!additions) return fail(DITORCH_ERROR, "the host has no memory to add in");

  count = 0;
  place at = first_place(call);
  do {
    const int64_t index = index_at(call, &at);
    if (index == call->skipped) continue;
    additions[count++] = (addition){table_offset(call, &at, index), dense_offset(call, &at)};
  } while (next_place(&at));
  qsort(additions, (size_t)count, sizeof *additions, compare_additions);

  const void* dense = chip_bytes(call->dense.data);
  void* table = chip_bytes(call->table.data);
  for (int64_t i = 0; i < count;) {
    const int64_t to = additions[i].to;
    double total = read_number(table, dtype, to);
    for (; i < count && additions[i].to == to; ++i) {
      total += read_number(dense, dtype, additions[i].from);
    }
    write_number(table, dtype, to, total);
  }
  free(additions);
  return DITORCH_OK;
}
