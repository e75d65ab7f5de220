/* Elements of tensors, read and written one at a time: what the plain kernels of this skeleton are
 * made of. It goes when the last of them runs on the chip. */
#ifndef ELEMENTS_H
#define ELEMENTS_H

#include "operators.h"

#define MOST_DIMENSIONS 64 /* of a torch tensor */

int64_t bytes_of(ditorch_dtype dtype);
int is_floating(ditorch_dtype dtype);
/* Whether there are elements of the dtype here: all but complex ones. */
int is_known(ditorch_dtype dtype);

/* Element `i`, as a number or, of a dtype that is not floating, as an integer. */
double read_number(const void* from, ditorch_dtype dtype, int64_t i);
int64_t read_integer(const void* from, ditorch_dtype dtype, int64_t i);

/* Rounded to nearest for floating dtypes; toward zero and modulo the width for integers, 0 or 1 for
 * BOOL. */
void write_number(void* to, ditorch_dtype dtype, int64_t i, double value);
void write_integer(void* to, ditorch_dtype dtype, int64_t i, int64_t value);

/* Places of a shape, the last dimension the fastest:
 *
 *   place at = {.dimensions = n, .sizes = sizes};
 *   do use(offset_of(&at, strides)); while (next_place(&at)); */
typedef struct place {
  int32_t dimensions;
  const int64_t* sizes;
  int64_t index[MOST_DIMENSIONS];
} place;

int next_place(place* at);
int64_t offset_of(const place* at, const int64_t* strides);

#endif
