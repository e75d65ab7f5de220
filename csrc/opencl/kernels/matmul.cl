// Products of matrices. a and b are packed into panels first, so that one kernel serves every
// layout and dtype, reads memory in order and knows no edges but those of the result.
//
// Options: -DDATA=<dtype>, -DROWS=<rows of a tile>, -DVECTORS=<vectors of a tile's row>,
// -DDEPTH_OF_ITEM=<how much of a panel's depth an item packs>; -DLOCAL_SIDE=<n> gives a tile to
// n * n items that share it in local memory, as GPUs want it, instead of to one.
typedef JOIN(storage_, DATA) storage;
#define GET JOIN(get_, DATA)
#define PUT JOIN(put_, DATA)
#define STORE_PART JOIN(store_, DATA)

#define COLUMNS (VECTORS * WIDTH)

// A matrix in memory: element (i, j) of matrix n is at n * batch + i * row + j * column.
typedef struct {
  long batch, row, column;
} strides;

// panels[n][panel][k][i] = element (panel * size + i, k) of matrix n; zero beyond the last row.
static inline void pack(global const storage* from, strides at, long rows, long depth, int size,
                        global scalar* panels, long panel, long count_of_panels) {
  const long n = get_global_id(2);
  const long first = panel * size, begin = (long)get_global_id(0) * DEPTH_OF_ITEM;
  const long end = min(begin + DEPTH_OF_ITEM, depth);
  const int count = (int)min((long)size, rows - first);
  from += n * at.batch + first * at.row;
  panels += ((n * count_of_panels + panel) * depth) * size;
  if (at.row == 1) {
    for (long k = begin; k < end; ++k) {
      for (int i = 0; i < count; ++i) panels[k * size + i] = GET(from, k * at.column + i);
    }
  } else {
    for (int i = 0; i < count; ++i) {
      for (long k = begin; k < end; ++k) {
        panels[k * size + i] = GET(from, i * at.row + k * at.column);
      }
    }
  }
  for (long k = begin; k < end; ++k) {
    for (int i = count; i < size; ++i) panels[k * size + i] = 0;
  }
}

// Both matrices in one launch, which costs as much as packing a small one: a's panels, then b's.
kernel void pack_both(global const storage* a, strides at_a, long rows, global scalar* to_a,
                      global const storage* b, strides at_b, long columns, global scalar* to_b,
                      long depth, long panels_of_a) {
  const long panel = get_global_id(1), panels_of_b = get_global_size(1) - panels_of_a;
  if (panel < panels_of_a) {
    pack(a, at_a, rows, depth, ROWS, to_a, panel, panels_of_a);
  } else {
    pack(b, at_b, columns, depth, COLUMNS, to_b, panel - panels_of_a, panels_of_b);
  }
}

// Groups run in an order in which few panels of a meet all panels of b before the next ones do: the
// few stay in the cache.
typedef struct {
  long row, column, matrix;  // in tiles
} tile;

static inline tile tile_of_group(long panels_of_a) {
  const long together = get_num_groups(0);
  const long turns = (panels_of_a + together - 1) / together;
  tile own;
  own.row = (get_group_id(2) % turns) * together + get_group_id(0);
  own.column = get_group_id(1);
  own.matrix = get_group_id(2) / turns;
  return own;
}

#ifndef LOCAL_SIDE

// One item computes a tile of ROWS x VECTORS vectors in its registers.
kernel void multiply(global const scalar* a, global const scalar* b, global storage* out,
                     strides at, long rows, long columns, long depth, long panels_of_a) {
  const tile own = tile_of_group(panels_of_a);
  const long row = own.row * ROWS, column = own.column * COLUMNS, n = own.matrix;
  if (row >= rows) return;
  a += (n * panels_of_a + own.row) * depth * ROWS;
  b += (n * get_num_groups(1) + own.column) * depth * COLUMNS;
  vector sums[ROWS][VECTORS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) sums[i][j] = (vector)0;
  }
  for (long k = 0; k < depth; ++k) {
    vector of_b[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) of_b[j] = LOAD(j, b + k * COLUMNS);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const vector of_a = (vector)a[k * ROWS + i];
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) sums[i][j] = fma(of_a, of_b[j], sums[i][j]);
    }
  }
  out += n * at.batch + row * at.row + column * at.column;
  // Constant bounds keep the sums in registers.
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (row + i < rows) {
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
        const long left = columns - column - j * WIDTH;
        if (at.column == 1) {
          STORE_PART(out, i * at.row + j * WIDTH, left, sums[i][j]);
        } else {
          scalar parts[WIDTH];
          STORE(sums[i][j], 0, parts);
          for (int part = 0; part < WIDTH && part < left; ++part) {
            PUT(out, i * at.row + (j * WIDTH + part) * at.column, parts[part]);
          }
        }
      }
    }
  }
}

#else

#define STEP 16
#define SIDE LOCAL_SIDE
#define OWN_ROWS (ROWS / SIDE)
#define OWN_COLUMNS (COLUMNS / SIDE)

// A group computes the tile, each item OWN_ROWS x OWN_COLUMNS elements of it, SIDE apart.
kernel __attribute__((reqd_work_group_size(SIDE * SIDE, 1, 1))) void multiply(
    global const scalar* a, global const scalar* b, global storage* out, strides at, long rows,
    long columns, long depth, long panels_of_a) {
  local scalar of_a[STEP * ROWS], of_b[STEP * COLUMNS];
  const tile own = tile_of_group(panels_of_a);
  const long row = own.row * ROWS, column = own.column * COLUMNS, n = own.matrix;
  if (row >= rows) return;
  const int item = get_local_id(0), own_row = item / SIDE, own_column = item % SIDE;
  a += (n * panels_of_a + own.row) * depth * ROWS;
  b += (n * get_num_groups(1) + own.column) * depth * COLUMNS;
  scalar sums[OWN_ROWS][OWN_COLUMNS] = {{0}};
  for (long begin = 0; begin < depth; begin += STEP) {
    const int steps = (int)min((long)STEP, depth - begin);
    for (int i = item; i < steps * ROWS; i += SIDE * SIDE) of_a[i] = a[begin * ROWS + i];
    for (int i = item; i < steps * COLUMNS; i += SIDE * SIDE) of_b[i] = b[begin * COLUMNS + i];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < steps; ++k) {
      scalar own_b[OWN_COLUMNS];
#pragma unroll
      for (int j = 0; j < OWN_COLUMNS; ++j) own_b[j] = of_b[k * COLUMNS + own_column + j * SIDE];
#pragma unroll
      for (int i = 0; i < OWN_ROWS; ++i) {
        const scalar own_a = of_a[k * ROWS + own_row + i * SIDE];
#pragma unroll
        for (int j = 0; j < OWN_COLUMNS; ++j) sums[i][j] = fma(own_a, own_b[j], sums[i][j]);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  out += n * at.batch;
  for (int i = 0; i < OWN_ROWS; ++i) {
    const long to_row = row + own_row + i * SIDE;
    for (int j = 0; j < OWN_COLUMNS; ++j) {
      const long to_column = column + own_column + j * SIDE;
      if (to_row < rows && to_column < columns) {
        PUT(out, to_row * at.row + to_column * at.column, sums[i][j]);
      }
    }
  }
}

#endif

// One item computes a vector of one row, straight from a and b: for small and narrow matrices,
// where packing costs more than it saves.
kernel void multiply_directly(global const storage* a, strides at_a, global const storage* b,
                              strides at_b, global storage* out, strides at, long columns,
                              long depth) {
  const long column = (long)get_global_id(0) * WIDTH, row = get_global_id(1), n = get_global_id(2);
  const long left = columns - column;
  if (left <= 0) return;
  a += n * at_a.batch + row * at_a.row;
  b += n * at_b.batch + column * at_b.column;
  out += n * at.batch + row * at.row + column * at.column;
  vector sums = (vector)0;
  if (at_b.column == 1) {
    for (long k = 0; k < depth; ++k) {
      sums = fma((vector)GET(a, k * at_a.column),
                 JOIN(load_, DATA)(b, k * at_b.row, left, (scalar)0), sums);
    }
  } else {
    scalar parts[WIDTH];
    for (int j = 0; j < WIDTH; ++j) {
      scalar sum = 0;
      for (long k = 0; k < depth && j < left; ++k) {
        sum = fma((scalar)GET(a, k * at_a.column),
                  (scalar)GET(b, k * at_b.row + j * at_b.column), sum);
      }
      parts[j] = sum;
    }
    sums = LOAD(0, parts);
  }
  if (at.column == 1) {
    JOIN(store_, DATA)(out, 0, left, sums);
  } else {
    scalar parts[WIDTH];
    STORE(sums, 0, parts);
    for (int j = 0; j < WIDTH && j < left; ++j) PUT(out, j * at.column, parts[j]);
  }
}
