#include "ops/indexed.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "ops/charge.h"
#include "ops/map.h"
#include "ops/pointwise.h"

namespace ditorch::indexed {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;
using Entry = ditorch_status (*)(const ditorch_context*, const ditorch_indexed*);

bool is_plain(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.device().type() == kChip && tensor.device() == other.device() &&
         tensor.layout() == c10::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         abi_dtype(tensor.scalar_type()) <= DITORCH_BOOL;
}

ditorch_operand operand(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  return {const_cast<void*>(tensor.const_data_ptr()), abi_dtype(tensor.scalar_type()),
          strides.data()};
}

ditorch_status call(Entry entry, const ditorch_context& context, const at::Tensor& dense,
                    const at::Tensor& index, const at::Tensor& table, int64_t dim, int64_t skipped,
                    const at::Tensor& written) {
  const auto counts = index.scalar_type();
  if (!is_plain(dense, table) || !is_plain(index, table) || dense.numel() == 0 ||
      table.numel() == 0 || table.dim() != dense.dim() || dim < 0 || dim >= table.dim() ||
      (counts != c10::kLong && counts != c10::kInt) || dense.sizes() != index.sizes() ||
      dense.scalar_type() != table.scalar_type() || dense.is_alias_of(table) ||
      index.is_alias_of(written) || !has_elements_apart(written)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  for (int64_t other = 0; other < table.dim(); ++other) {
    if (other != dim && dense.size(other) > table.size(other)) return DITORCH_NOT_IMPLEMENTED;
  }
  auto strides = table.strides().vec();
  const auto stride = std::exchange(strides[dim], 0);
  const auto of_dense = dense.strides().vec(), of_index = index.strides().vec();
  const ditorch_indexed described{sizeof(described),
                                  static_cast<int32_t>(dense.dim()),
                                  dense.sizes().data(),
                                  operand(dense, of_dense),
                                  operand(index, of_index),
                                  operand(table, strides),
                                  stride,
                                  table.size(dim),
                                  skipped};
  return entry(&context, &described);
}

int64_t positive(int64_t dim, const at::Tensor& tensor) {
  return dim < 0 ? dim + tensor.dim() : dim;
}

// A vector of indices along dimension `dim`, the same for all of the others.
at::Tensor along(const at::Tensor& index, const at::Tensor& dense, int64_t dim) {
  std::vector<int64_t> shape(static_cast<size_t>(dense.dim()), 1);
  shape[dim] = index.numel();
  return index.reshape(shape).expand_as(dense);
}

// index_select(self, dim, index)
ditorch_status index_select(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto dim = positive(arguments[1].toInt(), self);
  const auto& index = arguments[2].toTensor();
  if (dim < 0 || dim >= self.dim() || index.dim() > 1) return DITORCH_NOT_IMPLEMENTED;
  auto sizes = self.sizes().vec();
  sizes[dim] = index.numel();
  const auto out = at::empty(sizes, self.options());
  results = {out};
  return gather(context, out, along(index, out, dim), self, dim);
}

// gather.out(self, dim, index, sparse_grad, out)
ditorch_status gather_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[4].toTensor();
  results = {out};
  return gather(context, out, arguments[2].toTensor(), self, positive(arguments[1].toInt(), self));
}

// scatter_add.out(self, dim, index, src, out)
ditorch_status scatter_add_out(const ditorch_context& context, Arguments arguments,
                               Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& index = arguments[2].toTensor();
  auto source = arguments[3].toTensor();
  const auto& out = arguments[4].toTensor();
  if (source.dim() != index.dim() || !is_plain(source, out) || self.sizes() != out.sizes()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  for (int64_t dim = 0; dim < index.dim(); ++dim) {  // the index may be the shorter one
    if (index.size(dim) > source.size(dim)) return DITORCH_NOT_IMPLEMENTED;
    source = source.narrow(dim, 0, index.size(dim));
  }
  results = {out};
  if (!out.is_same(self)) {
    const auto status = map_copy(context, out, self);
    if (status != DITORCH_OK) return status;
  }
  return scatter_add(context, source, index, out, positive(arguments[1].toInt(), self));
}

// embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
ditorch_status embedding_backward(const ditorch_context& context, Arguments arguments,
                                  Results& results) {
  const auto& given = arguments[0].toTensor();
  const auto& indices = arguments[1].toTensor();
  if (arguments[4].toBool() || given.dim() < 1 || !given.is_floating_point()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto grad = given.reshape({indices.numel(), given.size(-1)});
  const auto table = at::empty({arguments[2].toInt(), given.size(-1)}, given.options());
  results = {table};
  const auto status = pointwise::compute(context, {0.0}, {}, table);
  if (status != DITORCH_OK) return status;
  const auto padding = arguments[3].toInt();
  return scatter_add(context, grad, along(indices, grad, 0), table, 0,
                     padding < 0 ? kNothing : padding);
}

}  // namespace

bool vendor_has() { return vendor().operators->gather && vendor().operators->scatter_add; }

ditorch_status gather(const ditorch_context& context, const at::Tensor& dense,
                      const at::Tensor& index, const at::Tensor& table, int64_t dim,
                      int64_t skipped) {
  return call(vendor().operators->gather, context, dense, index, table, dim, skipped, dense);
}

ditorch_status scatter_add(const ditorch_context& context, const at::Tensor& dense,
                           const at::Tensor& index, const at::Tensor& table, int64_t dim,
                           int64_t skipped) {
  return call(vendor().operators->scatter_add, context, dense, index, table, dim, skipped, table);
}

VendorKernels all_kernels() {
  return {
      {"aten::index_select", index_select},
      {"aten::gather.out", gather_out},
      {"aten::scatter_add.out", scatter_add_out},
      {"aten::embedding_dense_backward", embedding_backward},
  };
}

}  // namespace ditorch::indexed
