/* Rows put in order, whole or only the first of it. */
#include <stdlib.h>
#include <string.h>

#include "chip.h"
#include "elements.h"
#include "kernels.h"

/* An element of a row: `number` if its dtype is floating, else `integer`; the other is 0. */
typedef struct item {
  double number;
  int64_t integer, place;
} item;

/* Negative if a's value is the smaller one. NaN is larger than every number. */
static int compare_values(const item* a, const item* b) {
  const int a_is_nan = a->number != a->number, b_is_nan = b->number != b->number;
  if (a_is_nan || b_is_nan) return a_is_nan - b_is_nan;
  if (a->number != b->number) return a->number < b->number ? -1 : 1;
  return (a->integer > b->integer) - (a->integer < b->integer);
}

/* Equal elements stay in the order in which they come. */
static int compare_places(const item* a, const item* b) {
  return (a->place > b->place) - (a->place < b->place);
}

static int ascending(const void* a, const void* b) {
  const int order = compare_values(a, b);
  return order ? order : compare_places(a, b);
}

static int descending(const void* a, const void* b) {
  const int order = compare_values(b, a);
  return order ? order : compare_places(a, b);
}

/* REPLACE. */
ditorch_status sort(const ditorch_context* context, const ditorch_sort* call) {
  (void)context;
  if (!is_known(call->dtype)) return DITORCH_NOT_IMPLEMENTED;
  const char* from = chip_bytes(call->input);
  char* values = chip_bytes(call->values);
  int64_t* places = chip_bytes(call->places);
  const int64_t bytes = bytes_of(call->dtype);
  item* items = malloc((size_t)call->length * sizeof *items);
  if (!items) return fail(DITORCH_ERROR, "the host has no memory to sort in");
  for (int64_t row = 0; row < call->rows; ++row) {
    for (int64_t i = 0; i < call->length; ++i) {
      items[i] = (item){.place = i};
      if (is_floating(call->dtype)) {
        items[i].number = read_number(from, call->dtype, i);
      } else {
        items[i].integer = read_integer(from, call->dtype, i);
      }
    }
    qsort(items, (size_t)call->length, sizeof *items, call->descending ? descending : ascending);
    for (int64_t i = 0; i < call->kept; ++i) {
      memcpy(values + i * bytes, from + items[i].place * bytes, (size_t)bytes);
      places[i] = items[i].place;
    }
    from += call->length * bytes;
    values += call->kept * bytes;
    places += call->kept;
  }
  free(items);
  return DITORCH_OK;
}
