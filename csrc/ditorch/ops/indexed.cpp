#include "ops/indexed.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <utility>

#include "ops/charge.h"
#include "ops/map.h"
#include "ops/optional_tensor.h"
#include "ops/pointwise.h"
#include "ops/tensors.h"

namespace ditorch::indexed {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;
using Entry = ditorch_status (*)(const ditorch_context*, const ditorch_indexed*);

ditorch_operand operand(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  return {const_cast<void*>(tensor.const_data_ptr()), abi_dtype(tensor.scalar_type()),
          strides.data()};
}

ditorch_status call(Entry entry, const ditorch_context& context, const at::Tensor& dense,
                    const at::Tensor& index, const at::Tensor& table, int64_t dim, int64_t skipped,
                    const at::Tensor& written) {
  const auto counts = index.scalar_type();
  if (!is_describable(dense, table) || !is_describable(index, table) || dense.numel() == 0 ||
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

// A vector of indices along dimension `dim`, the same for all of the others.
at::Tensor along(const at::Tensor& index, const at::Tensor& dense, int64_t dim) {
  std::vector<int64_t> shape(static_cast<size_t>(dense.dim()), 1);
  shape[dim] = index.numel();
  return index.reshape(shape).expand_as(dense);
}

// index_select(self, dim, index)
ditorch_status index_select(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto dim = from_front(arguments[1].toInt(), self);
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
  return gather(context, out, arguments[2].toTensor(), self,
                from_front(arguments[1].toInt(), self));
}

using Write = ditorch_status (*)(const ditorch_context&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, int64_t, int64_t);

// out = self, into which the source is written where the index names it.
ditorch_status write_into(const ditorch_context& context, Write write, Arguments arguments,
                          at::Tensor source, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& index = arguments[2].toTensor();
  const auto& out = arguments[4].toTensor();
  if (source.dim() != index.dim() || !is_describable(source, out) || self.sizes() != out.sizes()) {
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
  return write(context, source, index, out, from_front(arguments[1].toInt(), self), kNothing);
}

// scatter_add.out(self, dim, index, src, out), scatter.src_out alike
template <Write write>
ditorch_status scatter_out(const ditorch_context& context, Arguments arguments, Results& results) {
  return write_into(context, write, arguments, arguments[3].toTensor(), results);
}

// scatter.value_out(self, dim, index, value, out)
ditorch_status scatter_value_out(const ditorch_context& context, Arguments arguments,
                                 Results& results) {
  const auto value = at::empty({}, arguments[0].toTensor().options());
  const auto status = pointwise::compute(context, {option(0)}, {arguments[3]}, value);
  if (status != DITORCH_OK) return status;
  const auto& index = arguments[2].toTensor();
  return write_into(context, scatter, arguments, value.expand(index.sizes()), results);
}

// One vector of places along one dimension, as x[:, index] says it.
struct Selection {
  int64_t dim;
  at::Tensor index;      // counted from the front, of any shape
  c10::DimVector sizes;  // of what is selected

  at::Tensor rows(const at::Tensor& selected) const {  // the index's dimensions as one
    auto merged = selected.sizes().vec();
    merged.erase(merged.begin() + dim, merged.begin() + dim + index.dim());
    merged.insert(merged.begin() + dim, index.numel());
    return selected.reshape(merged);
  }
};

// Nothing where truth values or several tensors select.
std::optional<Selection> selection(const ditorch_context& context, const at::Tensor& self,
                                   const c10::IValue& indices) {
  std::optional<Selection> found;
  int64_t dim = 0;
  for (const c10::IValue& one : indices.toListRef()) {
    const auto index = optional_tensor(one);
    if (index.defined()) {
      const auto counts = index.scalar_type();
      if (found || dim >= self.dim() || index.numel() == 0 || index.device() != self.device() ||
          (counts != c10::kLong && counts != c10::kInt)) {
        return std::nullopt;
      }
      found = Selection{dim, index, c10::DimVector(self.sizes())};
    }
    ++dim;
  }
  if (!found) return std::nullopt;
  const auto counted = at::empty(found->index.sizes(), found->index.options());
  const auto length = static_cast<double>(self.size(found->dim));
  const Step a = argument(0);
  const Formula from_front = {a, 0.0, DITORCH_LESS, a, length, DITORCH_ADD, a, DITORCH_SELECT};
  if (pointwise::compute(context, from_front, {found->index}, counted) != DITORCH_OK) {
    return std::nullopt;
  }
  found->index = counted;
  auto& sizes = found->sizes;
  sizes.erase(sizes.begin() + found->dim);
  sizes.insert(sizes.begin() + found->dim, counted.sizes().begin(), counted.sizes().end());
  return found;
}

// index.Tensor_out(self, indices, out)
ditorch_status index_out(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& out = arguments[2].toTensor();
  if (!is_describable(self, out) || self.numel() == 0) return DITORCH_NOT_IMPLEMENTED;
  const auto selected = selection(context, self, arguments[1]);
  if (!selected || out.sizes() != selected->sizes) return DITORCH_NOT_IMPLEMENTED;
  // torch gives it the strides of self, between which the index's dimensions may not be one.
  const auto found = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  const auto rows = selected->rows(found);
  const auto index = along(selected->index.reshape({-1}), rows, selected->dim);
  const auto status = gather(context, rows, index, self, selected->dim);
  results = {out};
  if (status != DITORCH_OK || found.is_same(out)) return status;
  return map_copy(context, out, found);
}

// _index_put_impl_(self, indices, values, accumulate, unsafe)
ditorch_status index_put(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& values = arguments[2].toTensor();
  if (!is_describable(values, self) || self.numel() == 0 ||
      values.scalar_type() != self.scalar_type()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto selected = selection(context, self, arguments[1]);
  if (!selected || !at::is_expandable_to(values.sizes(), selected->sizes)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto rows = selected->rows(values.expand(selected->sizes));
  const auto index = along(selected->index.reshape({-1}), rows, selected->dim);
  results = {self};
  const auto write = arguments[3].toBool() ? scatter_add : scatter;
  return write(context, rows, index, self, selected->dim, kNothing);
}

// index_add.out(self, dim, index, source, alpha, out)
ditorch_status index_add_out(const ditorch_context& context, Arguments arguments,
                             Results& results) {
  const auto& self = arguments[0].toTensor();
  const auto& index = arguments[2].toTensor();
  const auto& source = arguments[3].toTensor();
  const auto& out = arguments[5].toTensor();
  const auto dim = from_front(arguments[1].toInt(), self);
  if (!arguments[4].toScalar().equal(1) || dim < 0 || dim >= source.dim() || index.dim() > 1 ||
      index.numel() != source.size(dim) || self.sizes() != out.sizes()) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  results = {out};
  if (!out.is_same(self)) {
    const auto status = map_copy(context, out, self);
    if (status != DITORCH_OK) return status;
  }
  if (source.numel() == 0) return DITORCH_OK;
  return scatter_add(context, source, along(index, source, dim), out, dim, kNothing);
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

ditorch_status scatter(const ditorch_context& context, const at::Tensor& dense,
                       const at::Tensor& index, const at::Tensor& table, int64_t dim,
                       int64_t skipped) {
  return call(vendor().operators->scatter, context, dense, index, table, dim, skipped, table);
}

VendorKernels all_kernels() {
  return {
      {"aten::index_select", index_select},
      {"aten::gather.out", gather_out},
      {"aten::index.Tensor_out", index_out},
      {"aten::scatter_add.out", scatter_out<scatter_add>},
      {"aten::index_add.out", index_add_out},
      {"aten::embedding_dense_backward", embedding_backward},
  };
}

VendorKernels scatter_kernels() {
  if (!vendor().operators->scatter) return {};
  return {
      {"aten::scatter.src_out", scatter_out<scatter>},
      {"aten::scatter.value_out", scatter_value_out},
      {"aten::_index_put_impl_", index_put},
  };
}

}  // namespace ditorch::indexed
