// Layer normalisation: y = (x - mean) * rstd * weight + bias, and its gradients.
#include "arguments.h"
#include "kernels.h"
#include "row_sum.h"
#include "rows.h"
#include "special.h"

namespace emuchip {
namespace {

struct LayerNormForward {
  Tensor out, mean, rstd, input, weight, bias;
  int64_t rows, normalized;
  double eps;
};

struct LayerNormBackward {
  Tensor grad_input, grad_weight, grad_bias, grad_output, input, mean, rstd, weight;
  int64_t rows, normalized;
};

template <class T>
void forward_rows(const LayerNormForward& call, const Numerics& numerics) {
  const int64_t n = call.normalized;
  const bool fast = is_fast(numerics, call.input.dtype);
  const Rows<T> inputs(call.input, n, numerics), outs(call.out, n, numerics);
  const Rows<T> means(call.mean, 1, numerics), rstds(call.rstd, 1, numerics);
  const std::vector<T> weight = Rows<T>(call.weight, n, numerics).load_or(1);
  const std::vector<T> bias = Rows<T>(call.bias, n, numerics).load_or(0);
  RowSum<T> sum(numerics, n);
  std::vector<T> x(n), squares(n);
  for (int64_t row = 0; row < call.rows; ++row) {
    inputs.load(row, x.data());
    T mean = sum(x.data()) / static_cast<T>(n);
    for (int64_t i = 0; i < n; ++i) {
      x[i] -= mean;
      squares[i] = x[i] * x[i];
    }
    const T variance = sum(squares.data()) / static_cast<T>(n);
    T rstd = rsqrt(variance + static_cast<T>(call.eps), fast);
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i] + bias[i];
    outs.store(row, x.data());
    means.store(row, &mean);
    rstds.store(row, &rstd);
  }
}

template <class T>
void backward_rows(const LayerNormBackward& call, const Numerics& numerics) {
  const int64_t n = call.normalized;
  const Rows<T> inputs(call.input, n, numerics), grad_outputs(call.grad_output, n, numerics);
  const Rows<T> means(call.mean, 1, numerics), rstds(call.rstd, 1, numerics);
  const Rows<T> grad_inputs(call.grad_input, n, numerics);
  const std::vector<T> weight = Rows<T>(call.weight, n, numerics).load_or(1);
  RowSum<T> sum(numerics, n);
  Accumulator<T> grad_weight(numerics, call.rows, n), grad_bias(numerics, call.rows, n);
  std::vector<T> x(n), dy(n), terms(n);
  for (int64_t row = 0; row < call.rows; ++row) {
    T mean, rstd;
    means.load(row, &mean);
    rstds.load(row, &rstd);
    inputs.load(row, x.data());
    grad_outputs.load(row, dy.data());
    for (int64_t i = 0; i < n; ++i) {
      x[i] = (x[i] - mean) * rstd;
      terms[i] = dy[i] * x[i];
    }
    grad_weight.add(terms.data());
    grad_bias.add(dy.data());
    // dx = rstd * (g - mean(g) - x * mean(g * x)), with x normalised and g = dy * weight
    for (int64_t i = 0; i < n; ++i) {
      dy[i] *= weight[i];
      terms[i] = dy[i] * x[i];
    }
    const T mean_g = sum(dy.data()) / static_cast<T>(n);
    const T mean_gx = sum(terms.data()) / static_cast<T>(n);
    for (int64_t i = 0; i < n; ++i) dy[i] = rstd * (dy[i] - mean_g - x[i] * mean_gx);
    grad_inputs.store(row, dy.data());
  }
  std::vector<T> sums(grad_weight.total(), grad_weight.total() + n);
  Rows<T>(call.grad_weight, n, numerics).store(0, sums.data());
  sums.assign(grad_bias.total(), grad_bias.total() + n);
  Rows<T>(call.grad_bias, n, numerics).store(0, sums.data());
}

}  // namespace

ditorch_status layer_norm(const ditorch_context*, ditorch_tensor* out, ditorch_tensor* mean,
                          ditorch_tensor* rstd, const ditorch_tensor* input,
                          const ditorch_tensor* weight, const ditorch_tensor* bias,
                          int64_t normalized, double eps) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  LayerNormForward call = {read_tensor(out),
                           read_tensor(mean),
                           read_tensor(rstd),
                           read_tensor(input),
                           read_tensor(weight),
                           read_tensor(bias),
                           0,
                           normalized,
                           eps};
  call.rows = count_rows(call.input, normalized);
  const int64_t elements = call.rows * normalized;
  const ditorch_status status = check_rows("layer_norm", {{"input", call.input, elements},
                                                          {"out", call.out, elements},
                                                          {"mean", call.mean, call.rows},
                                                          {"rstd", call.rstd, call.rows},
                                                          {"weight", call.weight, normalized},
                                                          {"bias", call.bias, normalized}});
  if (status != DITORCH_OK) return status;
  with_compute_type(call.input.dtype, *numerics,
                    [&]<class T>(T) { forward_rows<T>(call, *numerics); });
  return DITORCH_OK;
}

ditorch_status layer_norm_backward(const ditorch_context*, ditorch_tensor* grad_input,
                                   ditorch_tensor* grad_weight, ditorch_tensor* grad_bias,
                                   const ditorch_tensor* grad_output, const ditorch_tensor* input,
                                   const ditorch_tensor* mean, const ditorch_tensor* rstd,
                                   const ditorch_tensor* weight, int64_t normalized) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  LayerNormBackward call = {read_tensor(grad_input),
                            read_tensor(grad_weight),
                            read_tensor(grad_bias),
                            read_tensor(grad_output),
                            read_tensor(input),
                            read_tensor(mean),
                            read_tensor(rstd),
                            read_tensor(weight),
                            0,
                            normalized};
  call.rows = count_rows(call.input, normalized);
  const int64_t elements = call.rows * normalized;
  const ditorch_status status =
      check_rows("layer_norm_backward", {{"input", call.input, elements},
                                         {"grad_output", call.grad_output, elements},
                                         {"grad_input", call.grad_input, elements},
                                         {"mean", call.mean, call.rows},
                                         {"rstd", call.rstd, call.rows},
                                         {"weight", call.weight, normalized},
                                         {"grad_weight", call.grad_weight, normalized},
                                         {"grad_bias", call.grad_bias, normalized}});
  if (status != DITORCH_OK) return status;
  with_compute_type(call.input.dtype, *numerics,
                    [&]<class T>(T) { backward_rows<T>(call, *numerics); });
  return DITORCH_OK;
}

}  // namespace emuchip
