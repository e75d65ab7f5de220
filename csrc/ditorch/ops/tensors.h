// What vendor kernels ask of tensors, and how they hand them over.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <initializer_list>

#include "ops/charge.h"
#include "runtime/vendor.h"

namespace ditorch {

// An undefined tensor is an absent argument.
inline ditorch_tensor* handle(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return reinterpret_cast<ditorch_tensor*>(const_cast<at::Tensor*>(&tensor));
}

// A tensor as a descriptor has it, while the tensor lives; an undefined one has no data.
inline ditorch_operand operand_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, DITORCH_OTHER, nullptr};
  return {tensor.mutable_data_ptr(), abi_dtype(tensor.scalar_type()), tensor.strides().data()};
}

// A dimension counted from the front, which may be none of the tensor's.
inline int64_t from_front(int64_t dim, const at::Tensor& tensor) {
  return dim < 0 ? dim + tensor.dim() : dim;
}

inline bool is_last(const at::Tensor& tensor, int64_t dim) {
  return tensor.dim() > 0 && from_front(dim, tensor) == tensor.dim() - 1;
}

// Whether a descriptor can have the tensor: strided memory of the other's chip, of any real dtype,
// and nothing lazy.
inline bool is_describable(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.device().type() == kChip && tensor.device() == other.device() &&
         tensor.layout() == c10::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         abi_dtype(tensor.scalar_type()) <= DITORCH_BOOL;
}

// Dense tensors of one chip with elements in them, of a floating dtype, and nothing lazy.
inline bool are_plain(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  const auto chip = tensors.begin()->get().device();
  if (chip.type() != kChip) return false;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.device() != chip || !tensor.is_floating_point() || tensor.numel() == 0 ||
        tensor.is_conj() || tensor.is_neg()) {
      return false;
    }
  }
  return true;
}

inline bool are_contiguous(
    std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return !tensor.defined() || tensor.is_contiguous();
  });
}

// Tensors that lie alike and fill their memory, so that the i-th of every list are alike element
// by element.
inline bool are_alike(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.device() == other.device() && tensor.sizes() == other.sizes() &&
         tensor.strides() == other.strides() && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_conj() && !tensor.is_neg() && tensor.layout() == c10::kStrided;
}

// The dtype in which sums and statistics of a tensor are kept: float32 or wider.
inline c10::ScalarType wide_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == c10::kDouble ? c10::kDouble : c10::kFloat;
}

}  // namespace ditorch
