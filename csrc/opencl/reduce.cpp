#include "kernels.h"
#include "rows.h"

namespace opencl {
namespace {

constexpr int64_t kLengthOfPiece = 4096;
constexpr int64_t kEnoughSums = 256;  // as many go on at a time that none has to be cut in pieces

struct Shape {
  int64_t outer, reduced, inner;
};

// [outer, reduced, inner] of dtype `from` to [outer, pieces, inner] of dtype `to`.
void pass(Submission& submission, const void* input, ditorch_dtype from, void* out,
          ditorch_dtype to, const Shape& shape, int64_t pieces, double factor) {
  Device& device = submission.device();
  const std::string options = row_options(device, from) + " -DRESULT=" + name_of(device, to);
  with_scalar(from, factor, [&](auto scale) {
    if (shape.inner == 1) {
      submission.launch(device.programs->kernel("reduce", options, "reduce_rows"),
                        {static_cast<size_t>(pieces), static_cast<size_t>(shape.outer), 1},
                        items_of_row(device), input, out, cl_long{shape.reduced}, scale);
    } else {
      submission.launch_items(device.programs->kernel("reduce", options, "reduce_columns"),
                              {count_of(shape.inner, vector_width(device, from)),
                               static_cast<size_t>(pieces), static_cast<size_t>(shape.outer)},
                              input, out, cl_long{shape.reduced}, cl_long{shape.inner}, scale);
    }
  });
}

ditorch_status reduce(const ditorch_context* context, ditorch_tensor* out_handle,
                      const ditorch_tensor* input_handle, const Shape& shape, double factor) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const Tensor out = read_tensor(out_handle), input = read_tensor(input_handle);
    if (out.dtype != input.dtype || !are_known(device, {out, input})) {
      return DITORCH_NOT_IMPLEMENTED;
    }
    Submission submission(device.streams->of(context->stream));
    const bool has_many_sums = shape.outer * shape.inner >= kEnoughSums;
    const int64_t pieces =
        has_many_sums ? 1 : std::clamp(shape.reduced / kLengthOfPiece, int64_t{1}, kEnoughSums);
    if (pieces == 1) {
      pass(submission, input.data, input.dtype, out.data, out.dtype, shape, 1, factor);
      return DITORCH_OK;
    }
    const ditorch_dtype computed =
        input.dtype == DITORCH_FLOAT64 ? DITORCH_FLOAT64 : DITORCH_FLOAT32;
    void* partial = submission.scratch(static_cast<size_t>(shape.outer * pieces * shape.inner) *
                                       bytes_of(computed));
    pass(submission, input.data, input.dtype, partial, computed, shape, pieces, 1);
    pass(submission, partial, computed, out.data, out.dtype, {shape.outer, pieces, shape.inner}, 1,
         factor);
    return DITORCH_OK;
  });
}

}  // namespace

ditorch_status sum(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* input,
                   int64_t outer, int64_t reduced, int64_t inner) {
  return reduce(context, out, input, {outer, reduced, inner}, 1);
}

ditorch_status mean(const ditorch_context* context, ditorch_tensor* out,
                    const ditorch_tensor* input, int64_t outer, int64_t reduced, int64_t inner) {
  return reduce(context, out, input, {outer, reduced, inner}, 1.0 / static_cast<double>(reduced));
}

}  // namespace opencl
