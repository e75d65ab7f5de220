// CLBlast takes buffers: each is made around the shared virtual memory that a matrix lies in.
#include "product.h"

#ifdef OPENCL_HAS_CLBLAST
#include <clblast_c.h>

#include "memory.h"

namespace opencl {
namespace {

constexpr int64_t kWorthwhile = 128 * 128 * 128;  // its routines take seconds to build

// A matrix as BLAS has it: rows one after the other, or its transpose does.
struct Layout {
  bool is_plain, is_transposed;
  size_t leading;
};

Layout layout_of(const Matrices& matrices, int64_t rows, int64_t columns) {
  const auto [batch, row, column] = matrices.at;
  if (column == 1 && row >= columns) return {true, false, static_cast<size_t>(row)};
  if (row == 1 && column >= rows) return {true, true, static_cast<size_t>(column)};
  return {false, false, 0};
}

class Buffer {
 public:
  Buffer(Device& device, const Matrices& matrices, size_t element_bytes) {
    const auto [begin, bytes] = device.memory->around(matrices.data);
    offset = static_cast<size_t>(matrices.data - begin) / element_bytes;
    cl_int code;
    memory = clCreateBuffer(device.context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, bytes, begin,
                            &code);
    device.check(code, "make a buffer of its memory");
  }
  ~Buffer() { clReleaseMemObject(memory); }
  Buffer(const Buffer&) = delete;

  cl_mem memory = nullptr;
  size_t offset;  // in elements
};

template <class T, class Gemm>
void multiply(Submission& submission, const Product& product, Gemm gemm) {
  Device& device = submission.device();
  const Layout a = layout_of(product.a, product.rows, product.depth);
  const Layout b = layout_of(product.b, product.depth, product.columns);
  const Layout out = layout_of(product.out, product.rows, product.columns);
  const Buffer of_a(device, product.a, sizeof(T)), of_b(device, product.b, sizeof(T)),
      of_out(device, product.out, sizeof(T));
  const auto transposed = [](bool is) { return is ? CLBlastTransposeYes : CLBlastTransposeNo; };
  const auto size = [](int64_t number) { return static_cast<size_t>(number); };
  cl_command_queue queue = submission.stream().queue;
  for (int64_t n = 0; n < product.batches; ++n) {
    cl_event event = nullptr;
    const CLBlastStatusCode code =
        gemm(CLBlastLayoutRowMajor, transposed(a.is_transposed), transposed(b.is_transposed),
             size(product.rows), size(product.columns), size(product.depth), T(1), of_a.memory,
             of_a.offset + size(n * product.a.at.batch), a.leading, of_b.memory,
             of_b.offset + size(n * product.b.at.batch), b.leading, T(0), of_out.memory,
             of_out.offset + size(n * product.out.at.batch), out.leading, &queue, &event);
    device.check(code, "multiply by CLBlast");
    submission.note(event);
  }
}

}  // namespace

bool clblast_takes(const Device& device, const Product& product) {
  const bool is_whole =
      product.dtype == DITORCH_FLOAT32 || (product.dtype == DITORCH_FLOAT64 && device.has_double);
  const Layout out = layout_of(product.out, product.rows, product.columns);
  return is_whole && product.rows * product.columns * product.depth >= kWorthwhile &&
         layout_of(product.a, product.rows, product.depth).is_plain &&
         layout_of(product.b, product.depth, product.columns).is_plain && out.is_plain &&
         !out.is_transposed;
}

void compute_by_clblast(Submission& submission, const Product& product) {
  if (product.dtype == DITORCH_FLOAT64) {
    multiply<double>(submission, product, CLBlastDgemm);
  } else {
    multiply<float>(submission, product, CLBlastSgemm);
  }
}

}  // namespace opencl

#else

namespace opencl {

bool clblast_takes(const Device&, const Product&) { return false; }
void compute_by_clblast(Submission&, const Product&) {}

}  // namespace opencl
#endif
