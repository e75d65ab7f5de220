// Softmax and log-softmax over the last dimension, and their gradients.
#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "kernels.h"
#include "row_sum.h"
#include "rows.h"
#include "special.h"

namespace emuchip {
namespace {

template <class T>
void softmax_rows(const Tensor& out, const Tensor& input, const Numerics& numerics, bool log) {
  const int64_t length = input.sizes[input.dimensions - 1];
  const bool fast = is_fast(numerics, input.dtype);
  const Rows<T> inputs(input, length, numerics), outs(out, length, numerics);
  RowSum<T> sum(numerics, length);
  std::vector<T> values(length), powers(length);
  for (int64_t row = 0; row < count_rows(input, length); ++row) {
    inputs.load(row, values.data());
    const T largest = *std::max_element(values.begin(), values.end());
    for (T& value : values) value -= largest;
    powers = values;
    exp_nonpositive(powers.data(), length, fast);
    const T total = sum(powers.data());
    if (log) {
      const T log_total = std::log(total);
      for (T& value : values) value -= log_total;
      outs.store(row, values.data());
    } else {
      for (T& power : powers) power /= total;
      outs.store(row, powers.data());
    }
  }
}

template <class T>
void softmax_backward_rows(const Tensor& grad_input, const Tensor& grad_output,
                           const Tensor& output, const Numerics& numerics, bool log) {
  const int64_t length = output.sizes[output.dimensions - 1];
  const bool fast = is_fast(numerics, output.dtype);
  const Rows<T> grad_inputs(grad_input, length, numerics), outputs(output, length, numerics),
      grad_outputs(grad_output, length, numerics);
  RowSum<T> sum(numerics, length);
  std::vector<T> y(length), dy(length), terms(length);
  for (int64_t row = 0; row < count_rows(output, length); ++row) {
    outputs.load(row, y.data());
    grad_outputs.load(row, dy.data());
    if (log) {
      // dx = dy - softmax * sum(dy)
      exp_nonpositive(y.data(), length, fast);
      const T total = sum(dy.data());
      for (int64_t i = 0; i < length; ++i) dy[i] -= y[i] * total;
    } else {
      // dx = softmax * (dy - sum(softmax * dy))
      for (int64_t i = 0; i < length; ++i) terms[i] = y[i] * dy[i];
      const T total = sum(terms.data());
      for (int64_t i = 0; i < length; ++i) dy[i] = y[i] * (dy[i] - total);
    }
    grad_inputs.store(row, dy.data());
  }
}

ditorch_status forward(const char* operation, const Tensor& out, const Tensor& input, bool log) {
  const Numerics* numerics = own_numerics();
  if (!numerics || input.dimensions == 0) return DITORCH_NOT_IMPLEMENTED;
  const int64_t elements = input.elements();
  const ditorch_status status =
      check_rows(operation, {{"input", input, elements}, {"out", out, elements}});
  if (status != DITORCH_OK || elements == 0) return status;
  with_compute_type(input.dtype, *numerics,
                    [&]<class T>(T) { softmax_rows<T>(out, input, *numerics, log); });
  return DITORCH_OK;
}

ditorch_status backward(const char* operation, const Tensor& grad_input, const Tensor& grad_output,
                        const Tensor& output, bool log) {
  const Numerics* numerics = own_numerics();
  if (!numerics || output.dimensions == 0) return DITORCH_NOT_IMPLEMENTED;
  const int64_t elements = output.elements();
  const ditorch_status status = check_rows(operation, {{"output", output, elements},
                                                       {"grad_output", grad_output, elements},
                                                       {"grad_input", grad_input, elements}});
  if (status != DITORCH_OK || elements == 0) return status;
  with_compute_type(output.dtype, *numerics, [&]<class T>(T) {
    softmax_backward_rows<T>(grad_input, grad_output, output, *numerics, log);
  });
  return DITORCH_OK;
}

}  // namespace

ditorch_status softmax(const ditorch_context*, ditorch_tensor* out, const ditorch_tensor* input) {
  return forward("softmax", read_tensor(out), read_tensor(input), false);
}

ditorch_status log_softmax(const ditorch_context*, ditorch_tensor* out,
                           const ditorch_tensor* input) {
  return forward("log_softmax", read_tensor(out), read_tensor(input), true);
}

ditorch_status softmax_backward(const ditorch_context*, ditorch_tensor* grad_input,
                                const ditorch_tensor* grad_output, const ditorch_tensor* output) {
  return backward("softmax_backward", read_tensor(grad_input), read_tensor(grad_output),
                  read_tensor(output), false);
}

ditorch_status log_softmax_backward(const ditorch_context*, ditorch_tensor* grad_input,
                                    const ditorch_tensor* grad_output,
                                    const ditorch_tensor* output) {
  return backward("log_softmax_backward", read_tensor(grad_input), read_tensor(grad_output),
                  read_tensor(output), true);
}

}  // namespace emuchip
