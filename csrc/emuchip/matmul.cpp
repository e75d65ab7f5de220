// The entry for products: single matrices, or batches of them.
#include "error.h"
#include "kernels.h"
#include "product.h"
#include "rows.h"
#include "tensor.h"

namespace emuchip {
namespace {

Matrix matrix_of(const Tensor& tensor, int64_t batch) {
  const int32_t last = tensor.dimensions - 1;
  const int64_t offset = tensor.dimensions == 3 ? batch * tensor.strides[0] : 0;
  return {tensor.data + offset * element_bytes(tensor.dtype),
          tensor.dtype,
          tensor.sizes[last - 1],
          tensor.sizes[last],
          tensor.strides[last - 1],
          tensor.strides[last]};
}

ditorch_status check_shapes(const Tensor& out, const Tensor& a, const Tensor& b) {
  for (const Tensor* tensor : {&out, &a, &b}) {
    if (!tensor->floating() || tensor->dtype != a.dtype) return DITORCH_NOT_IMPLEMENTED;
    if (tensor->dimensions != a.dimensions || (a.dimensions != 2 && a.dimensions != 3)) {
      return DITORCH_NOT_IMPLEMENTED;
    }
  }
  const Matrix o = matrix_of(out, 0), x = matrix_of(a, 0), y = matrix_of(b, 0);
  const bool same_batch =
      a.dimensions == 2 || (out.sizes[0] == a.sizes[0] && out.sizes[0] == b.sizes[0]);
  if (!same_batch || o.rows != x.rows || o.columns != y.columns || x.columns != y.rows) {
    return fail(DITORCH_INVALID, "matmul: [%lld, %lld] @ [%lld, %lld] does not give [%lld, %lld]%s",
                static_cast<long long>(x.rows), static_cast<long long>(x.columns),
                static_cast<long long>(y.rows), static_cast<long long>(y.columns),
                static_cast<long long>(o.rows), static_cast<long long>(o.columns),
                same_batch ? "" : ", and the batches differ");
  }
  return DITORCH_OK;
}

}  // namespace

ditorch_status matmul(const ditorch_context*, ditorch_tensor* out_handle,
                      const ditorch_tensor* a_handle, const ditorch_tensor* b_handle) {
  const Numerics* numerics = own_numerics();
  if (!numerics) return DITORCH_NOT_IMPLEMENTED;
  const Tensor out = read_tensor(out_handle), a = read_tensor(a_handle), b = read_tensor(b_handle);
  const ditorch_status status = check_shapes(out, a, b);
  if (status != DITORCH_OK || out.elements() == 0) return status;
  const int64_t batches = out.dimensions == 3 ? out.sizes[0] : 1;
  with_compute_type(a.dtype, *numerics, [&]<class T>(T) {
    for (int64_t i = 0; i < batches; ++i) {
      multiply_matrices<T>(matrix_of(out, i), matrix_of(a, i), matrix_of(b, i), *numerics);
    }
  });
  return DITORCH_OK;
}

}  // namespace emuchip
