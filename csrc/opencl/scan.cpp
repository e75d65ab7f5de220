#include "kernels.h"
#include "rows.h"

namespace opencl {
namespace {

constexpr int64_t kLengthOfScanPiece = 1024;
constexpr int64_t kEnoughScans = 256;  // as many go on at a time that none has to be cut in pieces

}  // namespace

ditorch_status scan(const ditorch_context* context, const ditorch_scan* call) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const std::string data = element_of(device, call->dtype);
    if (data.empty() || call->dtype == DITORCH_BOOL) return DITORCH_NOT_IMPLEMENTED;
    const std::string options = compute_options(device, call->dtype) + " -DDATA=" + data +
                                " -DSUM=" + (is_floating(call->dtype) ? "scalar" : "long");
    const int64_t columns = call->outer * call->inner;
    const int64_t most = std::max(int64_t{1}, kEnoughScans / columns);
    const int64_t wanted = std::clamp(call->length / kLengthOfScanPiece, int64_t{1}, most);
    const int64_t of_piece = (call->length + wanted - 1) / wanted;
    const size_t pieces = count_of(call->length, of_piece);
    const Submission::Sizes items = {static_cast<size_t>(columns), pieces, 1};

    Submission submission(device.streams->of(context->stream));
    // One piece begins with nothing: it reads no sums.
    void* sums = pieces > 1 ? submission.scratch(items[0] * pieces * sizeof(cl_long)) : call->out;
    const cl_long length = call->length, inner = call->inner;
    if (pieces > 1) {
      submission.launch_items(device.programs->kernel("scan", options, "sum_pieces"), items,
                              call->input, sums, cl_long{columns}, length, inner,
                              cl_long{of_piece});
    }
    submission.launch_items(device.programs->kernel("scan", options, "scan"), items, call->input,
                            call->out, sums, cl_long{columns}, length, inner, cl_long{of_piece});
    return DITORCH_OK;
  });
}

}  // namespace opencl
