// Sums of a contiguous [outer, reduced, inner] over pieces of `reduced`: [outer, pieces, inner].
// Options: -DDATA=<dtype> of the input, -DRESULT=<dtype>, -DITEMS=<n>.
typedef JOIN(storage_, DATA) storage;
typedef JOIN(storage_, RESULT) result;
#define LOAD_PART JOIN(load_, DATA)
#define RUN 64  // elements that are added up before they join the rest, which loses less of each

// inner is 1: a group of ITEMS items for each sum.
kernel void reduce_rows(global const storage* input, global result* out, long reduced,
                        scalar factor) {
  local scalar shared[ITEMS];
  const long piece = get_group_id(0), pieces = get_num_groups(0), outer = get_group_id(1);
  const long of_piece = (reduced + pieces - 1) / pieces;
  const long end = min(reduced, (piece + 1) * of_piece);
  vector sums = (vector)0;
  input += outer * reduced;
  const long step = ITEMS * WIDTH;
  for (long run = piece * of_piece; run < end; run += RUN * step) {
    vector of_run = (vector)0;
    for (long i = run + (long)get_local_id(0) * WIDTH; i < min(end, run + RUN * step); i += step) {
      of_run += LOAD_PART(input, i, end - i, 0);
    }
    sums += of_run;
  }
  const scalar sum = sum_of_group(sum_of(sums), shared);
  if (get_local_id(0) == 0) JOIN(put_, RESULT)(out, outer * pieces + piece, sum * factor);
}

// One item for a vector of the inner dimension.
kernel void reduce_columns(global const storage* input, global result* out, long reduced,
                           long inner, scalar factor) {
  const long column = (long)get_global_id(0) * WIDTH, piece = get_global_id(1);
  const long pieces = get_global_size(1), outer = get_global_id(2);
  const long of_piece = (reduced + pieces - 1) / pieces;
  const long end = min(reduced, (piece + 1) * of_piece);
  vector sums = (vector)0;
  input += outer * reduced * inner + column;
  for (long run = piece * of_piece; run < end; run += RUN) {
    vector of_run = (vector)0;
    for (long i = run; i < min(end, run + RUN); ++i) {
      of_run += LOAD_PART(input, i * inner, inner - column, 0);
    }
    sums += of_run;
  }
  JOIN(store_, RESULT)(out, (outer * pieces + piece) * inner + column, inner - column,
                       sums * factor);
}
