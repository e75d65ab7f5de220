#include "kernels.h"
#include "rows.h"

namespace opencl {
namespace {

// Each row is the last dimension of tensors of one shape and dtype.
template <class... Tensors>
ditorch_status run(const ditorch_context* context, const char* name, const Tensors*... handles) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const Tensor tensors[] = {read_tensor(handles)...};
    const Tensor& first = tensors[0];
    for (const Tensor& tensor : tensors) {
      if (tensor.dtype != first.dtype || !are_known(device, {tensor})) {
        return DITORCH_NOT_IMPLEMENTED;
      }
    }
    const int64_t length = first.dimensions ? first.sizes[first.dimensions - 1] : 1;
    Submission submission(device.streams->of(context->stream));
    submission.launch(device.programs->kernel("softmax", row_options(device, first.dtype), name),
                      {static_cast<size_t>(first.elements() / length), 1, 1}, items_of_row(device),
                      read_tensor(handles).data..., cl_long{length});
    return DITORCH_OK;
  });
}

}  // namespace

ditorch_status softmax(const ditorch_context* context, ditorch_tensor* out,
                       const ditorch_tensor* input) {
  return run(context, "softmax", input, out);
}

ditorch_status softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                const ditorch_tensor* grad_output, const ditorch_tensor* output) {
  return run(context, "softmax_backward", grad_output, output, grad_input);
}

ditorch_status log_softmax(const ditorch_context* context, ditorch_tensor* out,
                           const ditorch_tensor* input) {
  return run(context, "log_softmax", input, out);
}

ditorch_status log_softmax_backward(const ditorch_context* context, ditorch_tensor* grad_input,
                                    const ditorch_tensor* grad_output,
                                    const ditorch_tensor* output) {
  return run(context, "log_softmax_backward", grad_output, output, grad_input);
}

}  // namespace opencl
