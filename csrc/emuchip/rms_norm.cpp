// Root-mean-square normalisation: y = x * rstd * weight, and its gradients.
#include "arguments.h"
#include "kernels.h"
#include "row_sum.h"
#include "rows.h"
#include "special.h"

namespace emuchip {
namespace {

struct RmsNormForward {
  Tensor out, rstd, input, weight;
  int64_t rows, normalized;
  double eps;
};

struct RmsNormBackward {
  Tensor grad_input, grad_weight, grad_output, input, rstd, weight;
  int64_t rows, normalized;
};

template <class T>
void forward_rows(const RmsNormForward& call, const Numerics& numerics) {
  const int64_t n = call.normalized;
  const bool fast = is_fast(numerics, call.input.dtype);
  const Rows<T> inputs(call.input, n, numerics), outs(call.out, n, numerics);
  const Rows<T> rstds(call.rstd, 1, numerics);
  const std::vector<T> weight = Rows<T>(call.weight, n, numerics).load_or(1);
  RowSum<T> sum(numerics, n);
  std::vector<T> x(n), squares(n);
  for (int64_t row = 0; row < call.rows; ++row) {
    inputs.load(row, x.data());
    for (int64_t i = 0; i < n; ++i) squares[i] = x[i] * x[i];
    const T mean_square = sum(squares.data()) / static_cast<T>(n);
    T rstd = rsqrt(mean_square + static_cast<T>(call.eps), fast);
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i];
    outs.store(row, x.data());
    rstds.store(row, &rstd);
  }
}

template <class T>
void backward_rows(const RmsNormBackward& call, const Numerics& numerics) {
  const int64_t n = call.normalized;
  const Rows<T> inputs(call.input, n, numerics), grad_outputs(call.grad_output, n, numerics);
  const Rows<T> rstds(call.rstd, 1, numerics), grad_inputs(call.grad_input, n, numerics);
  const std::vector<T> weight = Rows<T>(call.weight, n, numerics).load_or(1);
  RowSum<T> sum(numerics, n);
  Accumulator<T> grad_weight(numerics, call.rows, n);
  std::vector<T> x(n), dy(n), terms(n);
  for (int64_t row = 0; row < call.rows; ++row) {
    T rstd;
    rstds.load(row, &rstd);
    inputs.load(row, x.data());
    grad_outputs.load(row, dy.data());
    for (int64_t i = 0; i < n; ++i) {
      x[i] *= rstd;
      terms[i] = dy[i] * x[i];
    }
    grad_weight.add(terms.data());
    // dx = rstd * (g - x * mean(g * x)), with x normalised and g = dy * weight
    for (int64_t i = 0; i < n; ++i) {
      dy[i] *= weight[i];
      terms[i] = dy[i] * x[i];
    }
    const T mean_gx = sum(terms.data()) / static_cast<T>(n);
    for (int64_t i = 0; i < n; ++i) dy[i] = rstd * (dy[i] - x[i] * mean_gx);
    grad_inputs.store(row, dy.data());
  }
  std::vector<T> sums(grad_weight.total(), grad_weight.total() + n);
  Rows<T>(call.grad_weight, n, numerics).store(0, sums.data());
}

}  // namespace

ditorch_status rms_norm(const ditorch_context*, ditorch_tensor* out, ditorch_tensor* rstd,
                        const ditorch_tensor* input, const ditorch_tensor* weight,
                        int64_t normalized, double eps) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  RmsNormForward call = {read_tensor(out),
                         read_tensor(rstd),
                         read_tensor(input),
                         read_tensor(weight),
                         0,
                         normalized,
                         eps};
  call.rows = count_rows(call.input, normalized);
  const int64_t elements = call.rows * normalized;
  const ditorch_status status = check_rows("rms_norm", {{"input", call.input, elements},
                                                        {"out", call.out, elements},
                                                        {"rstd", call.rstd, call.rows},
                                                        {"weight", call.weight, normalized}});
  if (status != DITORCH_OK) return status;
  with_compute_type(call.input.dtype, *numerics,
                    [&]<class T>(T) { forward_rows<T>(call, *numerics); });
  return DITORCH_OK;
}

ditorch_status rms_norm_backward(const ditorch_context*, ditorch_tensor* grad_input,
                                 ditorch_tensor* grad_weight, const ditorch_tensor* grad_output,
                                 const ditorch_tensor* input, const ditorch_tensor* rstd,
                                 const ditorch_tensor* weight, int64_t normalized) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  RmsNormBackward call = {read_tensor(grad_input),
                          read_tensor(grad_weight),
                          read_tensor(grad_output),
                          read_tensor(input),
                          read_tensor(rstd),
                          read_tensor(weight),
                          0,
                          normalized};
  call.rows = count_rows(call.input, normalized);
  const int64_t elements = call.rows * normalized;
  const ditorch_status status =
      check_rows("rms_norm_backward", {{"input", call.input, elements},
                                       {"grad_output", call.grad_output, elements},
                                       {"grad_input", call.grad_input, elements},
                                       {"rstd", call.rstd, call.rows},
                                       {"weight", call.weight, normalized},
                                       {"grad_weight", call.grad_weight, normalized}});
  if (status != DITORCH_OK) return status;
  with_compute_type(call.input.dtype, *numerics,
                    [&]<class T>(T) { backward_rows<T>(call, *numerics); });
  return DITORCH_OK;
}

}  // namespace emuchip
