// Running sums along the middle of a contiguous [outer, length, inner]. Where there are few of them
// `length` is cut into pieces, which are worked on side by side: what each adds up to is found
// first, and the sums of a piece begin with all that comes before it.
//
// Options: -DDATA=<dtype>, -DSUM=<long or scalar>.
typedef JOIN(storage_, DATA) storage;
#define GET JOIN(get_, DATA)
#define PUT JOIN(put_, DATA)

typedef struct {
  long begin, end;  // in elements of the whole
  long column;      // of [outer, inner]
  int is_there;
} piece;

static inline piece own_piece(long columns, long length, long inner, long of_piece) {
  piece own;
  own.column = get_global_id(0);
  own.is_there = own.column < columns;
  const long first = own.column / inner * length * inner + own.column % inner;
  const long i = (long)get_global_id(1) * of_piece;
  own.begin = first + i * inner;
  own.end = first + min(i + of_piece, length) * inner;
  return own;
}

// sums[piece, column]
kernel void sum_pieces(global const storage* input, global SUM* sums, long columns, long length,
                       long inner, long of_piece) {
  const piece own = own_piece(columns, length, inner, of_piece);
  if (!own.is_there) return;
  SUM sum = 0;
  for (long i = own.begin; i < own.end; i += inner) sum += GET(input, i);
  sums[get_global_id(1) * columns + own.column] = sum;
}

kernel void scan(global const storage* input, global storage* out, global const SUM* sums,
                 long columns, long length, long inner, long of_piece) {
  const piece own = own_piece(columns, length, inner, of_piece);
  if (!own.is_there) return;
  SUM before = 0, sum = 0;
  for (long other = 0; other < (long)get_global_id(1); ++other) {
    before += sums[other * columns + own.column];
  }
  for (long i = own.begin; i < own.end; i += inner) {
    sum += GET(input, i);
    PUT(out, i, before + sum);
  }
}
