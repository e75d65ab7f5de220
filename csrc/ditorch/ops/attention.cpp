#include "ops/attention.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <cstddef>
#include <optional>

#include "ops/attention_arguments.h"
#include "ops/dropout.h"
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

// How weights come of scores: which keys a query sees, and what is done to what it sees.
struct Weighing {
  bool causal;
  int64_t window = 0, documents = 0;
  const int32_t* ends = nullptr;
  double soft_cap = 0, dropout = 0;
  int64_t dropout_key = 0;

  // Whether the vendor's descriptor has fields for it, and it makes sense.
  bool is_describable() const {
    size_t read = 0;
    if (window || ends) read = offsetof(ditorch_attention, soft_cap);
    if (soft_cap != 0 || dropout != 0) read = sizeof(ditorch_attention);
    return vendor().operators->attention_struct_size >= read && soft_cap >= 0 && dropout >= 0 &&
           dropout < 1;
  }
};

// A call as the ABI describes it. The tensors live as long as it is used.
struct Call {
  at::Tensor bias;  // spread over batch and heads
  ditorch_attention described;

  Call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
       const at::Tensor& given_bias, Weighing weighing, double scale, const at::Tensor& out,
       const at::Tensor& sums) {
    if (given_bias.defined()) {
      bias = given_bias.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
    }
    described = {sizeof(described),
                 abi_dtype(query.scalar_type()),
                 weighing.causal,
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
                 weighing.window,
                 weighing.documents,
                 weighing.ends,
                 weighing.soft_cap,
                 weighing.dropout,
                 weighing.dropout_key};
  }
};

// The key of a call that drops weights, as its backward is given it: it says which these are.
at::Tensor kept_key(const Weighing& weighing, const at::Tensor& query) {
  if (weighing.dropout == 0) return nothing(query);
  return at::scalar_tensor(weighing.dropout_key, at::TensorOptions(at::kCPU).dtype(at::kLong));
}

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
  Weighing weighing{.causal = arguments[5].toBool(), .dropout = arguments[4].toDouble()};
  if (!weighing.is_describable() || !are_describable(query, key, value, bias)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  if (weighing.dropout != 0) weighing.dropout_key = dropout::draw_key(context.device);
  const auto out = empty_out(query, value), sums = empty_sums(query);
  const Call call(query, key, value, bias, weighing, scale_of(arguments[7], query), out, sums);
  const auto none = nothing(query), drawn = kept_key(weighing, query);
  results = {out, sums, none, none, query.size(2), key.size(2), drawn, none, none};
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
  const double dropout = arguments[12].toDouble();
  const Weighing weighing{.causal = arguments[13].toBool(),
                          .dropout = dropout,
                          .dropout_key = key_of(dropout, arguments[kKeyOfBackward])};
  if (wanted[3] || !weighing.is_describable() || !are_describable(query, key, value, bias) ||
      grad_out.scalar_type() != query.scalar_type() || !are_plain({query, grad_out, out})) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  const auto of_query = at::empty_like(query), of_key = at::empty_like(key),
             of_value = at::empty_like(value);
  const Call call(query, key, value, bias, weighing, scale_of(arguments[16], query), out, sums);
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
  Weighing weighing;

  static std::optional<Flash> of(Arguments arguments, const FlashPlaces& at) {
    const auto ends = optional_tensor(arguments[at.cum_seq_q]);
    Flash found{as_heads(arguments[at.query].toTensor()),
                as_heads(arguments[at.query + 1].toTensor()),
                as_heads(arguments[at.query + 2].toTensor()),
                {.causal = is_causal(arguments, at),
                 .soft_cap = soft_cap_of(arguments, at),
                 .dropout = arguments[at.dropout_p].toDouble()}};
    Weighing& weighing = found.weighing;
    const int64_t before = window_of(arguments[at.window_left]);
    const int64_t after = window_of(arguments[at.window_right]);
    const int64_t keys = found.key.size(2);
    if (before >= 0 && before + 1 < keys) weighing.window = before + 1;
    if (ends.defined()) {
      // the first is 0
      weighing.documents = ends.numel() - 1;
      weighing.ends = static_cast<const int32_t*>(ends.const_data_ptr()) + 1;
    }
    const bool is_square = found.query.size(2) == keys;
    const bool sees_later = !weighing.causal && after >= 0;
    const bool fits = !sees_later && (is_square || !weighing.causal) &&
                      (weighing.causal || !weighing.window) && are_ends(arguments, at, ends) &&
                      weighing.is_describable() &&
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
// is_causal, return_debug_mask, scale, window_size_left, window_size_right, ..) -> output,
// logsumexp, rng_state, and what other devices keep beside. More follows: seqused_k, alibi_slopes
// and others in ATen's, soft_cap in ours.
ditorch_status flash_forward(const ditorch_context& context, Arguments arguments,
                             Results& results) {
  for (size_t i = kFlashForward.window_right + 1; i < arguments.size(); ++i) {
    if (!arguments[i].isNone() && !arguments[i].isDouble()) return DITORCH_NOT_IMPLEMENTED;
  }
  const auto& query = arguments[0].toTensor();
  auto flash = Flash::of(arguments, kFlashForward);
  if (!flash) return DITORCH_NOT_IMPLEMENTED;
  Weighing& weighing = flash->weighing;
  if (weighing.dropout != 0) weighing.dropout_key = dropout::draw_key(context.device);
  auto shape = query.sizes().vec();
  shape.back() = flash->value.size(3);
  const auto out = at::empty(shape, query.options()), sums = empty_sums(flash->query);
  const auto mixed = as_heads(out);
  const Call call(flash->query, flash->key, flash->value, at::Tensor(), weighing,
                  scale_of(arguments[kFlashForward.scale], query), mixed, sums);
  // a compiler takes no two results for one
  results = {out, query.dim() == 3 ? sums.squeeze(0) : sums, kept_key(weighing, query),
             nothing(query), nothing(query)};
  return vendor().operators->attention(&context, &call.described);
}

// _flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k,
// max_q, max_k, dropout_p, is_causal, rng_state, unused, scale, window_size_left,
// window_size_right, and in ours soft_cap) -> gradients of query, key and value
ditorch_status flash_backward(const ditorch_context& context, Arguments arguments,
                              Results& results) {
  const auto& grad_out = arguments[0].toTensor();
  const auto& query = arguments[1].toTensor();
  const auto& out = arguments[4].toTensor();
  const auto sums = arguments[5].toTensor().contiguous();
  auto flash = Flash::of(arguments, kFlashBackward);
  if (!flash || grad_out.scalar_type() != query.scalar_type() ||
      !are_plain({query, grad_out, out})) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  Weighing& weighing = flash->weighing;
  weighing.dropout_key = key_of(weighing.dropout, arguments[kKeyOfFlashBackward]);
  results = {at::empty_like(query), at::empty_like(arguments[2].toTensor()),
             at::empty_like(arguments[3].toTensor())};
  const auto given = as_heads(grad_out), mixed = as_heads(out);
  const auto of_query = as_heads(results[0].toTensor()), of_key = as_heads(results[1].toTensor()),
             of_value = as_heads(results[2].toTensor());
  const Call call(flash->query, flash->key, flash->value, at::Tensor(), weighing,
                  scale_of(arguments[kFlashBackward.scale], query), mixed, sums);
  const ditorch_attention_backward described{sizeof(described),  &call.described,
                                             operand_of(given),  operand_of(of_query),
                                             operand_of(of_key), operand_of(of_value)};
  return vendor().operators->attention_backward(&context, &described);
}

// Whether the vendor computes it of one query and one key. Asked while the vendor is loaded.
bool is_computed(const Weighing& weighing) {
  const auto* operators = vendor().operators;
  if (!operators || !operators->attention || !operators->attention_backward ||
      !weighing.is_describable()) {
    return false;
  }
  const auto one = at::empty({1, 1, 1, 1}, at::TensorOptions(chip_device(0)).dtype(c10::kFloat));
  const auto out = at::empty_like(one), sums = empty_sums(one);
  const Call call(one, one, one, at::Tensor(), weighing, /*scale=*/1, out, sums);
  const ditorch_context context{sizeof(context), 0, nullptr};
  return operators->attention(&context, &call.described) == DITORCH_OK;
}

// What torch asks before it takes attention apart: only what the chip's kernel computes stays
// whole.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout_p, bool, std::optional<double>,
               bool shares_kv_heads) {
  const auto whole = static_cast<int64_t>(at::SDPBackend::overrideable);
  const auto apart = static_cast<int64_t>(at::SDPBackend::math);
  const bool drops = dropout_p != 0;
  if (!at::globalContext().userEnabledOverrideableSDP() || (mask && mask->requires_grad()) ||
      (drops && !(dropout_p > 0 && dropout_p < 1))) {
    return apart;
  }
  // torch.vmap knows the parts alone, and sizes that are symbols say nothing yet.
  const auto* impl = query.unsafeGetTensorImpl();
  if (!vendor_has({.dropout = drops}) || impl->has_symbolic_sizes_strides() ||
      impl->key_set().has(c10::DispatchKey::FuncTorchBatched)) {
    return apart;
  }
  const auto bias = mask && mask->scalar_type() != at::kBool ? *mask : at::Tensor();
  const bool fits =
      are_describable(query, key, value, bias) && (shares_kv_heads || query.size(1) == key.size(1));
  return fits ? whole : apart;
}

}  // namespace

bool vendor_has(Extras extras) {
  static const bool whole = is_computed({.causal = true});
  static const Extras found{.apart = is_computed({.causal = true, .window = 1}),
                            .soft_cap = is_computed({.causal = true, .soft_cap = 1}),
                            .dropout = is_computed({.causal = true, .dropout = 0.5})};
  return whole && found.apart >= extras.apart && found.soft_cap >= extras.soft_cap &&
         found.dropout >= extras.dropout;
}

VendorKernels all_kernels() {
  return {{kForward, forward},
          {kBackward, backward},
          {kFlashForwardName, flash_forward},
          {kFlashBackwardName, flash_backward},
          {kCappedForwardName, flash_forward},
          {kCappedBackwardName, flash_backward}};
}

}  // namespace ditorch::attention

// Gradients and shapes of it are in ditorch/soft_cap.py.
TORCH_LIBRARY(ditorch, library) {
  library.def(
      "_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, "
      "Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
      "bool return_debug_mask, *, float? scale, SymInt? window_size_left, "
      "SymInt? window_size_right, float soft_cap) -> (Tensor output, Tensor softmax_logsumexp, "
      "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
      {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  library.def(
      "_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor logsumexp, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
      "SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, "
      "float? scale, SymInt? window_size_left, SymInt? window_size_right, float soft_cap) -> "
      "(Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &ditorch::attention::choose)
}  // namespace at::native
