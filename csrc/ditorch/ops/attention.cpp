#include "ops/attention.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <optional>

#include "ops/attention_arguments.h"
#include "ops/optional_tensor.h"
#include "ops/tensors.h"

namespace ditorch::attention {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

// A result that only other devices have. torch.compile saves it, and takes no undefined tensor.
at::Tensor nothing(const at::Tensor& query) { return at::empty({0}, query.options()); }

at::Tensor empty_sums(const at::Tensor& query) {
  return at::empty(query.sizes().slice(0, 3), query.options().dtype(wide_dtype(query)));
}

// Whether shapes, dtypes and memory are what a descriptor describes. The bias may be undefined.
bool are_describable(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& bias) {
  for (const at::Tensor* each : {&query, &key, &value}) {
    if (each->dim() != 4 || each->scalar_type() != query.scalar_type() ||
        each->size(0) != query.size(0)) {
      return false;
    }
  }
  if (!are_plain({query, key, value, bias}) ||
      key.sizes().slice(0, 3) != value.sizes().slice(0, 3) || key.size(3) != query.size(3) ||
      query.size(1) % key.size(1) != 0) {
    return false;
  }
  return !bias.defined() || (bias.scalar_type() == query.scalar_type() && bias.dim() <= 4);
}

// Which keys a query sees.
struct Seen {
  bool causal;
  int64_t window = 0, documents = 0;
  const int32_t* ends = nullptr;

  // Whether the vendor's descriptor has fields for it.
  bool is_describable() const {
    return (!window && !ends) ||
           vendor().operators->attention_struct_size >= sizeof(ditorch_attention);
  }
};

// A call as the ABI describes it. The tensors live as long as it is used.
struct Call {
  at::Tensor bias;  // spread over batch and heads
  ditorch_attention described;

  Call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
       const at::Tensor& given_bias, Seen seen, double scale, const at::Tensor& out,
       const at::Tensor& sums) {
    if (given_bias.defined()) {
      bias = given_bias.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
    }
    described = {sizeof(described),
                 abi_dtype(query.scalar_type()),
                 seen.causal,
                 scale,
                 query.size(0),
                 query.size(1),
                 key.size(1),
                 query.size(2),
                 key.size(2),
                 query.size(3),
                 value.size(3),
                 operand_of(query),
                 operand_of(key),
                 operand_of(value),
                 operand_of(bias),
                 operand_of(out),
                 sums.mutable_data_ptr(),
                 seen.window,
                 seen.documents,
                 seen.ends};
  }
};

// The output lies in memory as the query does, which heads next to each other in a row need.
at::Tensor empty_out(const at::Tensor& query, const at::Tensor& value) {
  if (query.size(3) == value.size(3)) return at::empty_like(query);
  const auto rows = {query.size(0), query.size(2), query.size(1), value.size(3)};
  return at::empty(rows, query.options()).transpose(1, 2);
}

// _scaled_dot_product_fused_attention_overrideable(query, key, value, attn_bias, dropout_p,
// is_causal, return_debug_mask, scale) -> output, logsumexp, and what other devices keep beside
ditorch_status forward(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& query = arguments[0].toTensor();
  const auto& key = arguments[1].toTensor();
  const auto& value = arguments[2].toTensor();
  const auto bias = optional_tensor(arguments[3]);
  if (arguments[4].toDouble() != 0 || !are_describable(query, key, value, bias)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto out = empty_out(query, value), sums = empty_sums(query);
  const Call call(query, key, value, bias, {arguments[5].toBool()}, scale_of(arguments[7], query),
                  out, sums);
  const auto none = nothing(query);
  results = {out, sums, none, none, query.size(2), key.size(2), none, none, none};
  return vendor().operators->attention(&context, &call.described);
}

// _scaled_dot_product_fused_attention_overrideable_backward(grad_out, query, key, value, attn_bias,
// grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
// philox_seed, philox_offset, scale) -> gradients of query, key, value and attn_bias
ditorch_status backward(const ditorch_context& context, Arguments arguments, Results& results) {
  const auto& grad_out = arguments[0].toTensor();
  const auto& query = arguments[1].toTensor();
  const auto& key = arguments[2].toTensor();
  const auto& value = arguments[3].toTensor();
  const auto bias = optional_tensor(arguments[4]);
  const auto wanted = arguments[5].toBoolList();
  const auto& out = arguments[6].toTensor();
  const auto sums = arguments[7].toTensor().contiguous();
  if (wanted[3] || arguments[12].toDouble() != 0 || !are_describable(query, key, value, bias) ||
      grad_out.scalar_type() != query.scalar_type() || !are_plain({query, grad_out, out})) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto of_query = at::empty_like(query), of_key = at::empty_like(key),
             of_value = at::empty_like(value);
  const Call call(query, key, value, bias, {arguments[13].toBool()}, scale_of(arguments[16], query),
                  out, sums);
  const ditorch_attention_backward described{sizeof(described),    &call.described,
                                             operand_of(grad_out), operand_of(of_query),
                                             operand_of(of_key),   operand_of(of_value)};
  results = {of_query, of_key, of_value, at::Tensor()};
  return vendor().operators->attention_backward(&context, &described);
}

// --- FlashAttention, by its names in ATen -----------------------------------------------------

// What a call of it says, in the shapes of a descriptor. Absent where the ABI has no words for it:
// the host then computes it.
struct Flash {
  at::Tensor query, key, value;
  Seen seen;

  static std::optional<Flash> of(Arguments arguments, const FlashPlaces& at) {
    const auto ends = optional_tensor(arguments[at.cum_seq_q]);
    Flash found{as_heads(arguments[at.query].toTensor()),
                as_heads(arguments[at.query + 1].toTensor()),
                as_heads(arguments[at.query + 2].toTensor()), Seen{is_causal(arguments, at)}};
    const int64_t before = window_of(arguments[at.window_left]);
    const int64_t after = window_of(arguments[at.window_right]);
    const int64_t keys = found.key.size(2);
    if (before >= 0 && before + 1 < keys) found.seen.window = before + 1;
    if (ends.defined()) {
      // the first is 0
      found.seen.documents = ends.numel() - 1;
      found.seen.ends = static_cast<const int32_t*>(ends.const_data_ptr()) + 1;
    }
    const bool is_square = found.query.size(2) == keys;
    const bool sees_later = !found.seen.causal && after >= 0;
    const bool fits = arguments[at.dropout_p].toDouble() == 0 && !sees_later &&
                      (is_square || !found.seen.causal) &&
                      (found.seen.causal || !found.seen.window) && are_ends(arguments, at, ends) &&
                      found.seen.is_describable() &&
                      are_describable(found.query, found.key, found.value, at::Tensor());
    if (!fits) return std::nullopt;
    return found;
  }

 private:
  // Whether documents lie alike in queries and keys, as the one tensor says in both places.
  static bool are_ends(Arguments arguments, const FlashPlaces& at, const at::Tensor& ends) {
    const auto of_keys = optional_tensor(arguments[at.cum_seq_q + 1]);
    if (!ends.defined() || !of_keys.defined()) return !ends.defined() && !of_keys.defined();
    return ends.const_data_ptr() == of_keys.const_data_ptr() && ends.sizes() == of_keys.sizes() &&
           ends.scalar_type() == c10::kInt && ends.dim() == 1 && ends.is_contiguous() &&
           ends.numel() > 1 && ends.device() == arguments[at.query].toTensor().device();
  }
};

// _flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
// is_causal, return_debug_mask, scale, window_size_left, window_size_right, seqused_k,
// alibi_slopes, ..) -> output, logsumexp, and what other devices keep beside
ditorch_status flash_forward(const ditorch_context& context, Arguments arguments,
                             Results& results) {
  for (size_t i = kFlashForward.window_right + 1; i < arguments.size(); ++i) {
    if (!arguments[i].isNone()) return DITORCH_NOT_IMPLEMENTED;
  }
  const auto& query = arguments[0].toTensor();
  const auto flash = Flash::of(arguments, kFlashForward);
  if (!flash) return DITORCH_NOT_IMPLEMENTED;
  auto shape = query.sizes().vec();
  shape.back() = flash->value.size(3);
  const auto out = at::empty(shape, query.options()), sums = empty_sums(flash->query);
  const auto seen = as_heads(out);
  const Call call(flash->query, flash->key, flash->value, at::Tensor(), flash->seen,
                  scale_of(arguments[kFlashForward.scale], query), seen, sums);
  const auto none = nothing(query);
  results = {out, query.dim() == 3 ? sums.squeeze(0) : sums, none, none, none};
  return vendor().operators->attention(&context, &call.described);
}

// _flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k,
// max_q, max_k, dropout_p, is_causal, rng_state, unused, scale, window_size_left,
// window_size_right) -> gradients of query, key and value
ditorch_status flash_backward(const ditorch_context& context, Arguments arguments,
                              Results& results) {
  const auto& grad_out = arguments[0].toTensor();
  const auto& query = arguments[1].toTensor();
  const auto& out = arguments[4].toTensor();
  const auto sums = arguments[5].toTensor().contiguous();
  const auto flash = Flash::of(arguments, kFlashBackward);
  if (!flash || grad_out.scalar_type() != query.scalar_type() ||
      !are_plain({query, grad_out, out})) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  results = {at::empty_like(query), at::empty_like(arguments[2].toTensor()),
             at::empty_like(arguments[3].toTensor())};
  const auto given = as_heads(grad_out), mixed = as_heads(out);
  const auto of_query = as_heads(results[0].toTensor()), of_key = as_heads(results[1].toTensor()),
             of_value = as_heads(results[2].toTensor());
  const Call call(flash->query, flash->key, flash->value, at::Tensor(), flash->seen,
                  scale_of(arguments[kFlashBackward.scale], query), mixed, sums);
  const ditorch_attention_backward described{sizeof(described),  &call.described,
                                             operand_of(given),  operand_of(of_query),
                                             operand_of(of_key), operand_of(of_value)};
  return vendor().operators->attention_backward(&context, &described);
}

// What torch asks before it takes attention apart: only what the chip's kernel computes stays
// whole.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout_p, bool, std::optional<double>,
               bool shares_kv_heads) {
  const auto whole = static_cast<int64_t>(at::SDPBackend::overrideable);
  const auto apart = static_cast<int64_t>(at::SDPBackend::math);
  if (!at::globalContext().userEnabledOverrideableSDP() || dropout_p != 0 ||
      (mask && mask->requires_grad())) {
    return apart;
  }
  // torch.vmap knows the parts alone, and sizes that are symbols say nothing yet.
  const auto* impl = query.unsafeGetTensorImpl();
  if (!is_one_kernel() || impl->has_symbolic_sizes_strides() ||
      impl->key_set().has(c10::DispatchKey::FuncTorchBatched)) {
    return apart;
  }
  const auto bias = mask && mask->scalar_type() != at::kBool ? *mask : at::Tensor();
  const bool fits =
      are_describable(query, key, value, bias) && (shares_kv_heads || query.size(1) == key.size(1));
  return fits ? whole : apart;
}

}  // namespace

bool vendor_has() {
  const auto* operators = vendor().operators;
  if (!operators || !operators->attention || !operators->attention_backward) return false;
  const auto one = at::empty({1, 1, 1, 1}, at::TensorOptions(chip_device(0)).dtype(c10::kFloat));
  const auto out = at::empty_like(one), sums = empty_sums(one);
  const Call call(one, one, one, at::Tensor(), {/*causal=*/true}, /*scale=*/1, out, sums);
  const ditorch_context context{sizeof(context), 0, nullptr};
  return operators->attention(&context, &call.described) == DITORCH_OK;
}

bool is_one_kernel() {
  static const bool is = find_vendor_kernel(kForward, "") != nullptr;
  return is;
}

bool keeps_documents_apart() { return is_one_kernel() && Seen{true, 1}.is_describable(); }

VendorKernels all_kernels() {
  return {{kForward, forward},
          {kBackward, backward},
          {kFlashForwardName, flash_forward},
          {kFlashBackwardName, flash_backward}};
}

}  // namespace ditorch::attention

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &ditorch::attention::choose)
}  // namespace at::native
