// Elements of a table that an index names: gathered, replaced, or added to. What is no index of the
// table is neither read nor written.
//
// Options: -DDATA=<dtype> of dense and table, -DINDEX=<dtype> of the index, -DRUN=<elements of the
// last dimension that an item moves>, -DIS_ROW where these lie side by side and have one index,
// -DIS_SUM for what adds, -DPOSITIONS=<how many an item of it looks at>.
typedef JOIN(storage_, DATA) storage;
typedef JOIN(storage_, INDEX) counted;

// Some of the dimensions: strides in elements.
typedef struct {
  long dimensions;
  long sizes[MOST_DIMENSIONS], dense[MOST_DIMENSIONS], index[MOST_DIMENSIONS],
      table[MOST_DIMENSIONS];
} walk;

// How an index is looked up in the table.
typedef struct {
  long stride, length, skipped;
} lookup;

typedef struct {
  long dense, index, table;
} offsets;

// Where a place of the dimensions before `end` begins.
static inline offsets offsets_of(const walk* over, long place, long end) {
  offsets at = {0, 0, 0};
  for (long d = end - 1; d >= 0; --d) {
    const long i = place % over->sizes[d];
    place /= over->sizes[d];
    at.dense += i * over->dense[d];
    at.index += i * over->index[d];
    at.table += i * over->table[d];
  }
  return at;
}

static inline int is_in_table(const lookup* by, long named) {
  return named >= 0 && named < by->length;
}

static inline int is_taken(const lookup* by, long named) {
  return named != by->skipped && is_in_table(by, named);
}

// Items share the places; each says whether one of its own has a faulty index.
kernel void find_faults(global const counted* index, global uchar* faults, long items, long places,
                        const walk over, const lookup by) {
  const long item = get_global_id(0);
  if (item >= items) return;
  uchar fault = 0;
  for (long place = item; place < places; place += items) {
    const long named = index[offsets_of(&over, place, over.dimensions).index];
    fault |= named != by.skipped && !is_in_table(&by, named);
  }
  faults[item] = fault;
}

#ifndef IS_SUM

#ifdef IS_ROW
#define STEP(operand) 1
#define STEP_OF_INDEX 0
#else
#define STEP(operand) over.operand[last]
#define STEP_OF_INDEX over.index[last]
#endif

#define FOR_RUN                                                                \
  const long last = over.dimensions - 1, first = get_global_id(0) * (long)RUN; \
  const long end = min(first + RUN, over.sizes[last]);                         \
  const offsets at = offsets_of(&over, get_global_id(1), last);                \
  for (long i = first; i < end; ++i)
#define NAMED index[at.index + i * STEP_OF_INDEX]
#define IN_DENSE dense[at.dense + i * STEP(dense)]
#define IN_TABLE(named) table[at.table + i * STEP(table) + (named) * by.stride]

kernel void gather(global storage* dense, global const counted* index, global const storage* table,
                   const walk over, const lookup by) {
  FOR_RUN {
    const long named = NAMED;
    IN_DENSE = is_taken(&by, named) ? IN_TABLE(named) : 0;
  }
}

kernel void scatter(global const storage* dense, global const counted* index, global storage* table,
                    const walk over, const lookup by) {
  FOR_RUN {
    const long named = NAMED;
    if (is_taken(&by, named)) IN_TABLE(named) = IN_DENSE;
  }
}

#else

#define RUN_OF_SUM 64  // rows that are added up before they join the rest, which loses less of each

// Where the row of each place begins, in the table (-1 where it names nothing) and in dense.
kernel void find_rows(global const counted* index, global long* targets, global long* sources,
                      long places, const walk over, const lookup by) {
  const long place = get_global_id(0);
  if (place >= places) return;
  const offsets at = offsets_of(&over, place, over.dimensions);
  const long named = index[at.index];
  targets[place] = is_taken(&by, named) ? at.table + named * by.stride : -1;
  sources[place] = at.dense;
}

static inline vector load_row(global const storage* from, long step, long left) {
  if (step == 1) return JOIN(load_, DATA)(from, 0, left, 0);
  scalar parts[WIDTH];
  for (int part = 0; part < WIDTH; ++part) {
    parts[part] = part < left ? (scalar)JOIN(get_, DATA)(from, part * step) : 0;
  }
  return LOAD(0, parts);
}

static inline void store_row(global storage* to, long step, long left, vector value) {
  if (step == 1) return JOIN(store_, DATA)(to, 0, left, value);
  scalar parts[WIDTH];
  STORE(value, 0, parts);
  for (int part = 0; part < WIDTH && part < left; ++part) {
    JOIN(put_, DATA)(to, part * step, parts[part]);
  }
}

// Places come in groups of `length`, in each of which `order` has them by target.
static inline long place_at(global const uint* order, long position, long length) {
  return position - position % length + order[position];
}

// Rows of one target are neighbours, in the order in which they come. One item adds up a vector of
// every target that begins among its positions: each element is written once, by one item, and the
// sum is the same in every run, as it would not be of atomic additions.
kernel void add_rows(global const storage* dense, global storage* table, global const long* targets,
                     global const long* sources, global const uint* order, long places, long length,
                     const walk row) {
  const long last = row.dimensions - 1, i = get_global_id(0) * (long)WIDTH;
  const long left = row.sizes[last] - i;
  if (left <= 0) return;
  const offsets at = offsets_of(&row, get_global_id(1), last);
  dense += at.dense + i * row.dense[last], table += at.table + i * row.table[last];
  const long first = get_global_id(2) * (long)POSITIONS, end = min(first + POSITIONS, places);
  for (long position = first; position < end; ++position) {
    const long target = targets[place_at(order, position, length)];
    if (target < 0) continue;
    if (position > 0 && targets[place_at(order, position - 1, length)] == target) continue;
    vector sum = (vector)0;
    for (long next = position, more = 1; more;) {
      vector of_run = (vector)0;
      for (long of_this = 0; more && of_this < RUN_OF_SUM; ++of_this) {
        const long place = place_at(order, next++, length);
        of_run += load_row(dense + sources[place], row.dense[last], left);
        more = next < places && targets[place_at(order, next, length)] == target;
      }
      sum += of_run;
    }
    store_row(table + target, row.table[last], left,
              load_row(table + target, row.table[last], left) + sum);
  }
}

#endif
