// Where the operators of attention keep their arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cmath>

namespace ditorch::attention {

constexpr const char* kForward = "aten::_scaled_dot_product_fused_attention_overrideable";
constexpr const char* kBackward = "aten::_scaled_dot_product_fused_attention_overrideable_backward";
constexpr const char* kFlashForwardName = "aten::_flash_attention_forward";
constexpr const char* kFlashBackwardName = "aten::_flash_attention_backward";
// The same with a soft cap of the scores, which ATen's have not.
constexpr const char* kCappedForwardName = "ditorch::_flash_attention_forward";
constexpr const char* kCappedBackwardName = "ditorch::_flash_attention_backward";

// Key and value follow the query, cum_seq_k follows cum_seq_q, max_k max_q; where there is a soft
// cap, it follows the windows.
struct FlashPlaces {
  size_t query, cum_seq_q, max_q, dropout_p, is_causal, scale, window_left, window_right;
};
constexpr FlashPlaces kFlashForward{0, 3, 5, 7, 8, 10, 11, 12};
constexpr FlashPlaces kFlashBackward{1, 6, 8, 10, 11, 14, 15, 16};
// Where the backwards have the key of what was dropped.
constexpr size_t kKeyOfBackward = 14, kKeyOfFlashBackward = 12;

inline double scale_of(const c10::IValue& scale, const at::Tensor& query) {
  return scale.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : scale.toDouble();
}

// How many keys a query sees on one side of its own; -1: all.
inline int64_t window_of(const c10::IValue& window) {
  return window.isNone() ? -1 : window.toInt();
}

// 0: none.
inline double soft_cap_of(c10::ArrayRef<c10::IValue> arguments, const FlashPlaces& at) {
  const size_t place = at.window_right + 1;
  const bool has_one = place < arguments.size() && arguments[place].isDouble();
  return has_one ? arguments[place].toDouble() : 0;
}

// A call that drops weights has its key in a result, which the backward is given: a scalar of the
// host, which nobody waits for, unless a tool put it on the chip.
inline int64_t key_of(double dropout, const c10::IValue& kept) {
  return dropout == 0 ? 0 : kept.toTensor().item<int64_t>();
}

inline bool is_causal(c10::ArrayRef<c10::IValue> arguments, const FlashPlaces& at) {
  return arguments[at.is_causal].toBool() || window_of(arguments[at.window_right]) == 0;
}

// [batch, rows, heads, size], or [rows, heads, size] of documents, as [batch, heads, rows, size].
inline at::Tensor as_heads(const at::Tensor& tensor) {
  return (tensor.dim() == 3 ? tensor.unsqueeze(0) : tensor).transpose(1, 2);
}

}  // namespace ditorch::attention
