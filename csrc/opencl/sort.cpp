#include "sort.h"

#include <limits>

#include "kernels.h"
#include "rows.h"

namespace opencl {
namespace {

constexpr int64_t kRun = 64;  // places that one item holds
constexpr int64_t kLongRun =
    1024;  // elements that it looks at where it has room for all that are kept

std::string options_of(const Device& device, ditorch_dtype dtype) {
  return compute_options(device, dtype) + " -DDATA=" + element_of(device, dtype) +
         (is_floating(dtype) ? " -DIS_FLOATING" : "") + " -DRUN=" + std::to_string(kRun);
}

}  // namespace

size_t bytes_of_order(const Rows& rows) {
  return static_cast<size_t>(rows.count * rows.length) * 2 * sizeof(cl_uint);
}

const cl_uint* order_of(Submission& submission, const Rows& rows, void* memory) {
  Programs& programs = *submission.device().programs;
  const std::string options = options_of(submission.device(), rows.dtype);
  const cl_long count = rows.count, length = rows.length, kept = rows.kept;
  const cl_int descending = rows.descending;
  auto* order = static_cast<cl_uint*>(memory);
  auto* other = order + count * length;
  cl_long width = kept > kRun ? kRun : kLongRun;
  submission.launch_items(programs.kernel("sort", options, "order_runs"),
                          {static_cast<size_t>(count) * count_of(length, width), 1, 1}, rows.data,
                          order, count, length, kept, width, descending);
  for (; width < length; width *= 2) {
    const size_t pairs = count_of(length, 2 * width);
    const size_t of_pair = count_of(std::min(2 * width, kept), kRun);
    submission.launch_items(programs.kernel("sort", options, "merge_runs"),
                            {static_cast<size_t>(count) * pairs * of_pair, 1, 1}, rows.data, order,
                            other, count, length, kept, width, descending);
    std::swap(order, other);
  }
  return order;
}

ditorch_status sort(const ditorch_context* context, const ditorch_sort* call) {
  return guarded([&] {
    Device& device = device_at(context->device);
    if (element_of(device, call->dtype).empty() ||
        call->length > std::numeric_limits<cl_uint>::max()) {
      return DITORCH_NOT_IMPLEMENTED;
    }
    const Rows rows{call->input,  call->dtype, call->rows,
                    call->length, call->kept,  call->descending != 0};
    Submission submission(device.streams->of(context->stream));
    const cl_uint* order = order_of(submission, rows, submission.scratch(bytes_of_order(rows)));
    submission.launch_items(
        device.programs->kernel("sort", options_of(device, call->dtype), "write_sorted"),
        {static_cast<size_t>(call->rows * call->kept), 1, 1}, call->input, order, call->values,
        call->places, cl_long{call->rows}, cl_long{call->length}, cl_long{call->kept});
    return DITORCH_OK;
  });
}

}  // namespace opencl
