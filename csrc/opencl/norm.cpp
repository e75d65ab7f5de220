// Layer norm, and RMS norm, which is layer norm that takes no mean off.
#include "kernels.h"
#include "rows.h"

namespace opencl {
namespace {

constexpr int64_t kRowsOfPiece = 64;  // summed by one item for the gradients of weight and bias
constexpr int64_t kMostPieces = 64;

struct Norm {
  Tensor input, weight, bias, mean, rstd;
  int64_t length;

  bool is_centered() const { return static_cast<bool>(mean); }
  int64_t rows() const { return input.elements() / length; }
};

// Weight and bias are of one dtype, or absent.
std::string options_of(const Device& device, const Norm& norm, const Tensor& parameter) {
  return row_options(device, norm.input.dtype) +
         " -DPARAMETER=" + name_of(device, parameter ? parameter.dtype : norm.input.dtype) +
         " -DSTATISTIC=" + name_of(device, norm.rstd.dtype);
}

// An absent tensor's place in a kernel's arguments: a pointer that it does not follow.
const char* place(const Tensor& tensor, const Norm& norm) {
  return tensor ? tensor.data : norm.input.data;
}

bool are_alike(const Tensor& one, const Tensor& other) {
  return !one || !other || one.dtype == other.dtype;
}

ditorch_status forward(const ditorch_context* context, const Norm& norm, const Tensor& out,
                       double eps) {
  Device& device = device_at(context->device);
  const Tensor& parameter = norm.weight ? norm.weight : norm.bias;
  if (!are_known(device, {norm.input, norm.weight, norm.bias, norm.mean, norm.rstd, out}) ||
      !are_alike(norm.weight, norm.bias) || !are_alike(norm.mean, norm.rstd)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  Submission submission(device.streams->of(context->stream));
  with_scalar(norm.input.dtype, eps, [&](auto epsilon) {
    submission.launch(device.programs->kernel("norm", options_of(device, norm, parameter), "norm"),
                      {static_cast<size_t>(norm.rows()), 1, 1}, items_of_row(device),
                      norm.input.data, place(norm.weight, norm), place(norm.bias, norm), out.data,
                      place(norm.mean, norm), norm.rstd.data, cl_long{norm.length}, epsilon,
                      cl_int{norm.is_centered()}, cl_int{static_cast<bool>(norm.weight)},
                      cl_int{static_cast<bool>(norm.bias)});
  });
  return DITORCH_OK;
}

ditorch_status backward(const ditorch_context* context, const Norm& norm, const Tensor& grad_output,
                        const Tensor& grad_input, const Tensor& grad_weight,
                        const Tensor& grad_bias) {
  Device& device = device_at(context->device);
  const Tensor& parameter = norm.weight ? norm.weight : grad_weight ? grad_weight : grad_bias;
  if (!are_known(device, {norm.input, norm.weight, norm.mean, norm.rstd, grad_output, grad_input,
                          grad_weight, grad_bias}) ||
      !are_alike(norm.weight, grad_weight) || !are_alike(grad_weight, grad_bias) ||
      !are_alike(norm.weight, grad_bias) || !are_alike(norm.mean, norm.rstd) ||
      !are_alike(grad_output, norm.input)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto kernel = [&](const char* name) {
    return device.programs->kernel("norm", options_of(device, norm, parameter), name);
  };
  const cl_int is_centered = norm.is_centered();
  Submission submission(device.streams->of(context->stream));
  if (grad_input) {
    submission.launch(kernel("norm_backward"), {static_cast<size_t>(norm.rows()), 1, 1},
                      items_of_row(device), grad_output.data, norm.input.data,
                      place(norm.weight, norm), place(norm.mean, norm), norm.rstd.data,
                      grad_input.data, cl_long{norm.length}, is_centered,
                      cl_int{static_cast<bool>(norm.weight)});
  }
  if (!grad_weight && !grad_bias) return DITORCH_OK;
  const int64_t pieces = std::clamp(norm.rows() / kRowsOfPiece, int64_t{1}, kMostPieces);
  const size_t sum_bytes = norm.input.dtype == DITORCH_FLOAT64 ? 8 : 4;
  void* partial = submission.scratch(static_cast<size_t>(2 * pieces * norm.length) * sum_bytes);
  submission.launch_items(kernel("norm_columns"),
                          {count_of(norm.length, vector_width(device, norm.input.dtype)),
                           static_cast<size_t>(pieces), 1},
                          grad_output.data, norm.input.data, place(norm.mean, norm), norm.rstd.data,
                          partial, cl_long{norm.rows()}, cl_long{norm.length}, is_centered);
  submission.launch_items(
      kernel("norm_gradients"), {static_cast<size_t>(norm.length), 1, 1}, partial,
      place(grad_weight, norm), place(grad_bias, norm), cl_long{pieces}, cl_long{norm.length},
      cl_int{static_cast<bool>(grad_weight)}, cl_int{static_cast<bool>(grad_bias)});
  return DITORCH_OK;
}

}  // namespace

ditorch_status layer_norm(const ditorch_context* context, ditorch_tensor* out, ditorch_tensor* mean,
                          ditorch_tensor* rstd, const ditorch_tensor* input,
                          const ditorch_tensor* weight, const ditorch_tensor* bias,
                          int64_t normalized, double eps) {
  return guarded([&] {
    const Norm norm = {read_tensor(input), read_tensor(weight), read_tensor(bias),
                       read_tensor(mean),  read_tensor(rstd),   normalized};
    return forward(context, norm, read_tensor(out), eps);
  });
}

ditorch_status layer_norm_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                   ditorch_tensor* grad_weight, ditorch_tensor* grad_bias,
                                   const ditorch_tensor* grad_output, const ditorch_tensor* input,
                                   const ditorch_tensor* mean, const ditorch_tensor* rstd,
                                   const ditorch_tensor* weight, int64_t normalized) {
  return guarded([&] {
    const Norm norm = {read_tensor(input), read_tensor(weight), Tensor(),
                       read_tensor(mean),  read_tensor(rstd),   normalized};
    return backward(context, norm, read_tensor(grad_output), read_tensor(grad_input),
                    read_tensor(grad_weight), read_tensor(grad_bias));
  });
}

ditorch_status rms_norm(const ditorch_context* context, ditorch_tensor* out, ditorch_tensor* rstd,
                        const ditorch_tensor* input, const ditorch_tensor* weight,
                        int64_t normalized, double eps) {
  return guarded([&] {
    const Norm norm = {read_tensor(input), read_tensor(weight), Tensor(),
                       Tensor(),           read_tensor(rstd),   normalized};
    return forward(context, norm, read_tensor(out), eps);
  });
}

ditorch_status rms_norm_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                 ditorch_tensor* grad_weight, const ditorch_tensor* grad_output,
                                 const ditorch_tensor* input, const ditorch_tensor* rstd,
                                 const ditorch_tensor* weight, int64_t normalized) {
  return guarded([&] {
    const Norm norm = {read_tensor(input), read_tensor(weight), Tensor(),
                       Tensor(),           read_tensor(rstd),   normalized};
    return backward(context, norm, read_tensor(grad_output), read_tensor(grad_input),
                    read_tensor(grad_weight), Tensor());
  });
}

}  // namespace opencl
