// Layer norm and RMS norm over rows, a group of ITEMS items for each; RMS norm is layer norm that
// takes no mean off (is_centered = 0). Options: -DDATA=<dtype> of input and output,
// -DPARAMETER=<dtype> of weight and bias, -DSTATISTIC=<dtype> of mean and rstd, -DITEMS=<n>.
typedef JOIN(storage_, DATA) storage;
typedef JOIN(storage_, PARAMETER) parameter;
typedef JOIN(storage_, STATISTIC) statistic;
#define LOAD_PART JOIN(load_, DATA)
#define STORE_PART JOIN(store_, DATA)
#define LOAD_PARAMETER JOIN(load_, PARAMETER)
#define FOR_PARTS for (long i = (long)get_local_id(0) * WIDTH; i < length; i += ITEMS * WIDTH)

kernel void norm(global const storage* input, global const parameter* weight,
                 global const parameter* bias, global storage* out, global statistic* means,
                 global statistic* rstds, long length, scalar eps, int is_centered, int has_weight,
                 int has_bias) {
  local scalar shared[ITEMS];
  const long row = get_group_id(0);
  input += row * length, out += row * length;
  scalar mean = 0;
  if (is_centered) {
    vector sums = (vector)0;
    FOR_PARTS sums += LOAD_PART(input, i, length - i, 0);
    mean = sum_of_group(sum_of(sums), shared) / length;
  }
  vector squares = (vector)0;
  FOR_PARTS {
    const vector away = LOAD_PART(input, i, length - i, mean) - mean;
    squares += away * away;
  }
  const scalar rstd = 1 / sqrt(sum_of_group(sum_of(squares), shared) / length + eps);
  if (get_local_id(0) == 0) {
    if (is_centered) JOIN(put_, STATISTIC)(means, row, mean);
    JOIN(put_, STATISTIC)(rstds, row, rstd);
  }
  FOR_PARTS {
    vector value = (LOAD_PART(input, i, length - i, mean) - mean) * rstd;
    if (has_weight) value *= LOAD_PARAMETER(weight, i, length - i, 0);
    if (has_bias) value += LOAD_PARAMETER(bias, i, length - i, 0);
    STORE_PART(out, i, length - i, value);
  }
}

kernel void norm_backward(global const storage* grad_output, global const storage* input,
                          global const parameter* weight, global const statistic* means,
                          global const statistic* rstds, global storage* grad_input, long length,
                          int is_centered, int has_weight) {
  local scalar shared[ITEMS];
  const long row = get_group_id(0);
  grad_output += row * length, input += row * length, grad_input += row * length;
  const scalar mean = is_centered ? (scalar)JOIN(get_, STATISTIC)(means, row) : (scalar)0;
  const scalar rstd = JOIN(get_, STATISTIC)(rstds, row);
  vector grads = (vector)0, products = (vector)0;
  FOR_PARTS {
    vector grad = LOAD_PART(grad_output, i, length - i, 0);
    if (has_weight) grad *= LOAD_PARAMETER(weight, i, length - i, 0);
    grads += grad;
    products += grad * (LOAD_PART(input, i, length - i, mean) - mean) * rstd;
  }
  const scalar of_grads = is_centered ? sum_of_group(sum_of(grads), shared) / length : 0;
  const scalar of_products = sum_of_group(sum_of(products), shared) / length;
  FOR_PARTS {
    vector grad = LOAD_PART(grad_output, i, length - i, 0);
    if (has_weight) grad *= LOAD_PARAMETER(weight, i, length - i, 0);
    const vector normalized = (LOAD_PART(input, i, length - i, mean) - mean) * rstd;
    STORE_PART(grad_input, i, length - i, rstd * (grad - of_grads - normalized * of_products));
  }
}

// partial[0][piece] and [1][piece]: what a piece of the rows adds to the gradients of weight and
// bias. One item for a vector of columns of a piece.
kernel void norm_columns(global const storage* grad_output, global const storage* input,
                         global const statistic* means, global const statistic* rstds,
                         global scalar* partial, long rows, long length, int is_centered) {
  const long column = (long)get_global_id(0) * WIDTH, piece = get_global_id(1);
  const long pieces = get_global_size(1), of_piece = (rows + pieces - 1) / pieces;
  const long left = length - column;
  vector of_weight = (vector)0, of_bias = (vector)0;
  for (long row = piece * of_piece; row < min(rows, (piece + 1) * of_piece); ++row) {
    const scalar mean = is_centered ? (scalar)JOIN(get_, STATISTIC)(means, row) : (scalar)0;
    const scalar rstd = JOIN(get_, STATISTIC)(rstds, row);
    const vector grad = LOAD_PART(grad_output, row * length + column, left, 0);
    of_weight += grad * (LOAD_PART(input, row * length + column, left, mean) - mean) * rstd;
    of_bias += grad;
  }
  scalar parts[2][WIDTH];
  STORE(of_weight, 0, parts[0]);
  STORE(of_bias, 0, parts[1]);
  for (int which = 0; which < 2; ++which) {
    for (int part = 0; part < WIDTH && part < left; ++part) {
      partial[(which * pieces + piece) * length + column + part] = parts[which][part];
    }
  }
}

// One item for each column; a gradient that is not wanted is not written.
kernel void norm_gradients(global const scalar* partial, global parameter* grad_weight,
                           global parameter* grad_bias, long pieces, long length, int has_weight,
                           int has_bias) {
  const long column = get_global_id(0);
  if (column >= length) return;
  scalar of_weight = 0, of_bias = 0;
  for (long piece = 0; piece < pieces; ++piece) {
    of_weight += partial[piece * length + column];
    of_bias += partial[(pieces + piece) * length + column];
  }
  if (has_weight) JOIN(put_, PARAMETER)(grad_weight, column, of_weight);
  if (has_bias) JOIN(put_, PARAMETER)(grad_bias, column, of_bias);
}
