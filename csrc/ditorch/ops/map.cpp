#include "ops/map.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "ops/charge.h"

namespace ditorch {
namespace {

bool is_operand(const at::Tensor& tensor) {
  const auto dtype = abi_dtype(tensor.scalar_type());
  return tensor.device().type() == kChip && tensor.layout() == c10::kStrided && !tensor.is_conj() &&
         !tensor.is_neg() && tensor.numel() > 0 && dtype != DITORCH_OTHER &&
         dtype != DITORCH_COMPLEX64 && dtype != DITORCH_COMPLEX128;
}

}  // namespace

bool has_elements_apart(const at::Tensor& tensor) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dimensions;  // stride and size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1) dimensions.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t extent = 1;  // elements that the dimensions so far may reach
  for (const auto& [stride, size] : dimensions) {
    if (stride < extent) return false;
    extent += stride * (size - 1);
  }
  return true;
}

std::optional<ditorch_dtype> compute_dtype_of(c10::ScalarType common) {
  if (common == c10::kDouble) return DITORCH_FLOAT64;
  if (at::isFloatingType(common)) return DITORCH_FLOAT32;
  if (at::isIntegralType(common, /*includeBool=*/true)) return DITORCH_INT64;
  return std::nullopt;
}

bool vendor_runs(Program program) {
  if (!vendor().operators || !vendor().operators->map) return false;
  const auto tensor = at::empty({1}, at::TensorOptions(chip_device(0)).dtype(c10::kFloat));
  const ditorch_context context{sizeof(context), 0, nullptr};
  Operands operands(tensor);
  program.store(operands.add_written());
  return operands.run(context, DITORCH_FLOAT32, program) == DITORCH_OK;
}

bool vendor_has_map() {
  static const bool has = [] {
    Program program;
    program.constant(0, 0);
    return vendor_runs(std::move(program));
  }();
  return has;
}

Operands::Operands(const at::Tensor& written)
    : written_(written), sizes_(written.sizes().begin(), written.sizes().end()) {}

int32_t Operands::add(const at::Tensor& tensor) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i]->is_same(tensor)) return static_cast<int32_t>(i);
  }
  const auto missing = written_.dim() - tensor.dim();
  if (tensors_.size() + 1 >= DITORCH_MAP_OPERANDS || missing < 0 || !is_operand(tensor) ||
      tensor.device() != written_.device()) {
    return -1;
  }
  if (tensor.is_alias_of(written_) && !tensor.is_same(written_)) {
    const auto overlap = at::get_overlap_status(written_, tensor);
    const bool same = overlap == at::MemOverlapStatus::Full && tensor.dtype() == written_.dtype() &&
                      tensor.strides() == written_.strides();
    if (overlap != at::MemOverlapStatus::No && !same) return -1;
  }
  Strides strides(static_cast<size_t>(missing), 0);
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != written_.size(dim + missing) && tensor.size(dim) != 1) return -1;
    strides.push_back(tensor.size(dim) == 1 ? 0 : tensor.stride(dim));
  }
  tensors_.push_back(&tensor);
  strides_.push_back(std::move(strides));
  return static_cast<int32_t>(tensors_.size()) - 1;
}

int32_t Operands::add_written() {
  if (!is_operand(written_) || !has_elements_apart(written_)) return -1;
  tensors_.push_back(&written_);
  strides_.emplace_back(written_.strides().begin(), written_.strides().end());
  return static_cast<int32_t>(tensors_.size()) - 1;
}

// Puts the dimensions in the order in which what is written lies in memory and makes one of those
// that are one for every operand, so that the vendor's innermost loop is long.
void Operands::merge_dimensions() {
  const auto& outs = strides_.back();
  c10::SmallVector<size_t, 6> order;
  for (size_t dim = 0; dim < sizes_.size(); ++dim) {
    if (sizes_[dim] != 1) order.push_back(dim);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return outs[a] > outs[b]; });
  Strides sizes;
  c10::SmallVector<Strides, 8> strides(strides_.size());
  for (auto dim : order) {
    bool joins = !sizes.empty();
    for (size_t i = 0; i < strides_.size() && joins; ++i) {
      joins = strides[i].back() == strides_[i][dim] * sizes_[dim];
    }
    if (joins) {
      sizes.back() *= sizes_[dim];
      for (size_t i = 0; i < strides_.size(); ++i) strides[i].back() = strides_[i][dim];
    } else {
      sizes.push_back(sizes_[dim]);
      for (size_t i = 0; i < strides_.size(); ++i) strides[i].push_back(strides_[i][dim]);
    }
  }
  if (sizes.empty()) {
    sizes.push_back(1);
    for (auto& stride : strides) stride.push_back(1);
  }
  sizes_ = std::move(sizes);
  strides_ = std::move(strides);
}

ditorch_status Operands::run(const ditorch_context& context, ditorch_dtype compute,
                             const Program& program) {
  if (program.size() > static_cast<int32_t>(DITORCH_MAP_INSTRUCTIONS)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  merge_dimensions();
  c10::SmallVector<ditorch_operand, 8> operands;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& tensor = *tensors_[i];
    void* data = i + 1 == tensors_.size() ? tensor.mutable_data_ptr()
                                          : const_cast<void*>(tensor.const_data_ptr());
    operands.push_back({data, abi_dtype(tensor.scalar_type()), strides_[i].data()});
  }
  const ditorch_map call{sizeof(call),
                         compute,
                         static_cast<int32_t>(sizes_.size()),
                         static_cast<int32_t>(operands.size()),
                         program.size(),
                         sizes_.data(),
                         operands.data(),
                         program.data()};
  return vendor().operators->map(&context, &call);
}

ditorch_status map_copy(const ditorch_context& context, const at::Tensor& destination,
                        const at::Tensor& source) {
  const auto from = source.scalar_type(), to = destination.scalar_type();
  if (!vendor_has_map() || abi_dtype(from) > DITORCH_BOOL || abi_dtype(to) > DITORCH_BOOL) {
    return DITORCH_NOT_IMPLEMENTED;  // such as float8, which torch promotes with nothing
  }
  const auto compute = compute_dtype_of(from == to ? from : c10::promoteTypes(from, to));
  if (!compute) return DITORCH_NOT_IMPLEMENTED;
  Operands operands(destination);
  const auto in = operands.add(source), out = operands.add_written();
  if (in < 0 || out < 0) return DITORCH_NOT_IMPLEMENTED;
  Program program;
  program.load(in);
  program.store(out);
  return operands.run(context, *compute, program);
}

}  // namespace ditorch
