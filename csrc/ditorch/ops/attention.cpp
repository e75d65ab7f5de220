#include "ops/attention.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <array>
#include <cmath>

#include "ops/optional_tensor.h"
#include "ops/tensors.h"

namespace ditorch::attention {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;

constexpr const char* kForward = "aten::_scaled_dot_product_fused_attention_overrideable";
constexpr const char* kBackward = "aten::_scaled_dot_product_fused_attention_overrideable_backward";

double scale_of(const c10::IValue& scale, const at::Tensor& query) {
  return scale.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : scale.toDouble();
}

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

// A call as the ABI describes it. The tensors live as long as it is used.
struct Call {
  at::Tensor bias;  // spread over batch and heads
  ditorch_attention described;

  Call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
       const at::Tensor& given_bias, bool causal, double scale, const at::Tensor& out,
       const at::Tensor& sums) {
    if (given_bias.defined()) {
      bias = given_bias.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
    }
    described = {sizeof(described),
                 abi_dtype(query.scalar_type()),
                 causal,
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
                 sums.mutable_data_ptr()};
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
  const Call call(query, key, value, bias, arguments[5].toBool(), scale_of(arguments[7], query),
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
  const Call call(query, key, value, bias, arguments[13].toBool(), scale_of(arguments[16], query),
                  out, sums);
  const ditorch_attention_backward described{sizeof(described),    &call.described,
                                             operand_of(grad_out), operand_of(of_query),
                                             operand_of(of_key),   operand_of(of_value)};
  results = {of_query, of_key, of_value, at::Tensor()};
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

// The keys or values of every query head.
at::Tensor for_each_head(const at::Tensor& shared, const at::Tensor& query) {
  return shared.to(wide_dtype(query)).repeat_interleave(query.size(1) / shared.size(1), 1);
}

at::Tensor sum_of_heads(const at::Tensor& gradient, const at::Tensor& shared) {
  return gradient.unflatten(1, {shared.size(1), -1}).sum(2).to(shared.scalar_type());
}

// [batch, heads, queries, keys], in float32 or wider.
at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& bias,
                     bool causal, double scale) {
  auto scores = query.to(wide_dtype(query)).matmul(for_each_head(key, query).mT()) * scale;
  if (bias.defined()) scores = scores + bias;
  if (!causal) return scores;
  const auto later = at::ones_like(scores, scores.options().dtype(at::kBool)).triu(1);
  return scores.masked_fill(later, -INFINITY);
}

// What a score's share of its row is; none where a query sees no key.
at::Tensor powers_of(const at::Tensor& scores, const at::Tensor& sums) {
  const auto total = sums.unsqueeze(-1);
  return (scores - total).exp().masked_fill(total == -INFINITY, 0);
}

void host_forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 8);
  const auto& query = arguments[0].toTensor();
  const auto& key = arguments[1].toTensor();
  const auto scores = scores_of(query, key, optional_tensor(arguments[3]), arguments[5].toBool(),
                                scale_of(arguments[7], query));
  const auto sums = scores.logsumexp(-1);
  const auto out = powers_of(scores, sums).matmul(for_each_head(arguments[2].toTensor(), query));
  const auto none = nothing(query);
  torch::jit::push(*stack, out.to(query.scalar_type()), sums, none, none, query.size(2),
                   key.size(2), none, none, none);
}

void host_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 17);
  const auto& query = arguments[1].toTensor();
  const auto& key = arguments[2].toTensor();
  const auto& value = arguments[3].toTensor();
  const auto wide = wide_dtype(query);
  const auto grad_out = arguments[0].toTensor().to(wide);
  const auto out = arguments[6].toTensor().to(wide);
  const double scale = scale_of(arguments[16], query);
  const auto scores =
      scores_of(query, key, optional_tensor(arguments[4]), arguments[13].toBool(), scale);
  const auto powers = powers_of(scores, arguments[7].toTensor());
  const auto grad_powers = grad_out.matmul(for_each_head(value, query).mT());
  const auto grad_scores = powers * (grad_powers - (grad_out * out).sum(-1, /*keepdim=*/true));
  const auto grad_query = grad_scores.matmul(for_each_head(key, query)) * scale;
  const auto grad_key = grad_scores.mT().matmul(query.to(wide)) * scale;
  torch::jit::push(*stack, grad_query.to(query.scalar_type()), sum_of_heads(grad_key, key),
                   sum_of_heads(powers.mT().matmul(grad_out), value), at::Tensor());
}

}  // namespace

bool vendor_has() {
  const auto* operators = vendor().operators;
  if (!operators || !operators->attention || !operators->attention_backward) return false;
  const auto one = at::empty({1, 1, 1, 1}, at::TensorOptions(chip_device(0)).dtype(c10::kFloat));
  const auto out = at::empty_like(one), sums = empty_sums(one);
  const Call call(one, one, one, at::Tensor(), /*causal=*/true, /*scale=*/1, out, sums);
  const ditorch_context context{sizeof(context), 0, nullptr};
  return operators->attention(&context, &call.described) == DITORCH_OK;
}

bool is_one_kernel() {
  static const bool is = find_vendor_kernel(kForward, "") != nullptr;
  return is;
}

VendorKernels all_kernels() { return {{kForward, forward}, {kBackward, backward}}; }

void register_on_host(torch::Library& library) {
  library.impl(kForward, torch::CppFunction::makeFromBoxedFunction<&host_forward>());
  library.impl(kBackward, torch::CppFunction::makeFromBoxedFunction<&host_backward>());
}

}  // namespace ditorch::attention

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &ditorch::attention::choose)
}  // namespace at::native
