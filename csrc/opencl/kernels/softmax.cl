// Softmax over rows, a group of ITEMS items for each. Options: -DDATA=<dtype>, -DITEMS=<n>.
typedef JOIN(storage_, DATA) storage;
#define LOAD_PART JOIN(load_, DATA)
#define STORE_PART JOIN(store_, DATA)
#define FOR_PARTS for (long i = (long)get_local_id(0) * WIDTH; i < length; i += ITEMS * WIDTH)

// A row's largest element, which is taken off before the exponential, and the sum of these.
static inline void extent(global const storage* input, long length, scalar* largest, scalar* sum,
                          local scalar* shared) {
  vector most = (vector)(-INFINITY), sums = (vector)0;
  FOR_PARTS most = fmax(most, LOAD_PART(input, i, length - i, -INFINITY));
  *largest = largest_of_group(largest_of(most), shared);
  FOR_PARTS sums += exp(LOAD_PART(input, i, length - i, -INFINITY) - *largest);
  *sum = sum_of_group(sum_of(sums), shared);
}

kernel void softmax(global const storage* input, global storage* out, long length) {
  local scalar shared[ITEMS];
  input += get_group_id(0) * length, out += get_group_id(0) * length;
  scalar largest, sum;
  extent(input, length, &largest, &sum, shared);
  FOR_PARTS {
    STORE_PART(out, i, length - i, exp(LOAD_PART(input, i, length - i, 0) - largest) / sum);
  }
}

kernel void log_softmax(global const storage* input, global storage* out, long length) {
  local scalar shared[ITEMS];
  input += get_group_id(0) * length, out += get_group_id(0) * length;
  scalar largest, sum;
  extent(input, length, &largest, &sum, shared);
  const scalar of_sum = log(sum);
  FOR_PARTS {
    STORE_PART(out, i, length - i, LOAD_PART(input, i, length - i, 0) - largest - of_sum);
  }
}

kernel void softmax_backward(global const storage* grad_output, global const storage* output,
                             global storage* grad_input, long length) {
  local scalar shared[ITEMS];
  const long first = get_group_id(0) * length;
  grad_output += first, output += first, grad_input += first;
  vector sums = (vector)0;
  FOR_PARTS {
    sums += LOAD_PART(grad_output, i, length - i, 0) * LOAD_PART(output, i, length - i, 0);
  }
  const scalar sum = sum_of_group(sum_of(sums), shared);
  FOR_PARTS {
    const vector grad = LOAD_PART(grad_output, i, length - i, 0);
    STORE_PART(grad_input, i, length - i, LOAD_PART(output, i, length - i, 0) * (grad - sum));
  }
}

kernel void log_softmax_backward(global const storage* grad_output, global const storage* output,
                                 global storage* grad_input, long length) {
  local scalar shared[ITEMS];
  const long first = get_group_id(0) * length;
  grad_output += first, output += first, grad_input += first;
  vector sums = (vector)0;
  FOR_PARTS sums += LOAD_PART(grad_output, i, length - i, 0);
  const scalar sum = sum_of_group(sum_of(sums), shared);
  FOR_PARTS {
    const vector grad = LOAD_PART(grad_output, i, length - i, 0);
    STORE_PART(grad_input, i, length - i,
               grad - exp(LOAD_PART(output, i, length - i, 0)) * sum);
  }
}
