// The CPU's kernels of attention's operators, which torch has for other devices alone. Precision
// tools ask for them, and chips that have no kernel of their own for a call.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "ops/attention.h"
#include "ops/attention_arguments.h"
#include "ops/optional_tensor.h"
#include "ops/tensors.h"

namespace ditorch::attention::on_host {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

// The keys or values of every query head.
at::Tensor for_each_head(const at::Tensor& shared, const at::Tensor& query) {
  return shared.to(wide_dtype(query)).repeat_interleave(query.size(1) / shared.size(1), 1);
}

at::Tensor sum_of_heads(const at::Tensor& gradient, const at::Tensor& shared) {
  return gradient.unflatten(1, {shared.size(1), -1}).sum(2).to(shared.scalar_type());
}

// What is dropped of all weights of a call, [batch, heads, queries, keys].
struct Dropout {
  double share = 0;
  int64_t key = 0;
  int64_t queries = 0, keys = 0;

  // A call's own draws its key as the chip does, whose generator the host's then stands for.
  static int64_t draw_key() {
    auto generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    return static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(generator)->random64());
  }

  // What the weights of some queries and keys are multiplied by, shaped as they are: 0 where they
  // are dropped.
  at::Tensor kept(const at::Tensor& weights, int64_t first_query, int64_t first_key) const {
    constexpr int64_t kWords = 4;
    const auto kept_share = static_cast<float>(1 - share);
    const int64_t rows = weights.size(2), columns = weights.size(3);
    const auto found = at::empty(weights.sizes(), weights.options().dtype(at::kDouble));
    auto* out = found.mutable_data_ptr<double>();
    for (int64_t head = 0; head < weights.size(0) * weights.size(1); ++head) {
      for (int64_t row = first_query; row < first_query + rows; ++row) {
        const int64_t number = (head * queries + row) * keys + first_key;
        at::Philox4_32 words(key, /*subsequence=*/0, /*offset=*/number / kWords);
        for (int64_t skipped = 0; skipped < number % kWords; ++skipped) words();
        for (int64_t i = 0; i < columns; ++i) {
          const auto drawn = static_cast<float>(words() >> 8) * 0x1p-24f;
          *out++ = drawn < kept_share ? 1 / (1 - share) : 0;
        }
      }
    }
    return found.to(weights.scalar_type());
  }
};

// Attention from [batch, heads, queries, size]. Bias and what is unseen need not be defined.
struct Attention {
  at::Tensor query, key, value, bias;
  at::Tensor unseen = {};  // [queries, keys]
  double scale;
  double soft_cap = 0;
  Dropout dropout;
  int64_t first_query = 0, first_key = 0;  // in what is dropped

  // [batch, heads, queries, keys], in float32 or wider.
  at::Tensor scores() const {
    auto scores = query.to(wide_dtype(query)).matmul(for_each_head(key, query).mT()) * scale;
    if (soft_cap != 0) scores = (scores / soft_cap).tanh() * soft_cap;
    if (bias.defined()) scores = scores + bias;
    return unseen.defined() ? scores.masked_fill(unseen, -INFINITY) : scores;
  }

  // What a score's share of its row is; none where a query sees no key.
  static at::Tensor powers(const at::Tensor& scores, const at::Tensor& sums) {
    const auto total = sums.unsqueeze(-1);
    return (scores - total).exp().masked_fill(total == -INFINITY, 0);
  }

  // What weights are multiplied by, as dropout has it.
  at::Tensor dropped(const at::Tensor& weights) const {
    if (dropout.share == 0) return weights;
    return weights * dropout.kept(weights, first_query, first_key);
  }

  // The output and log_sum_exp.
  std::tuple<at::Tensor, at::Tensor> forward() const {
    const auto of_pairs = scores(), sums = of_pairs.logsumexp(-1);
    const auto out = dropped(powers(of_pairs, sums)).matmul(for_each_head(value, query));
    return {out.to(query.scalar_type()), sums};
  }

  // Gradients of query, key and value.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& given,
                                                          const at::Tensor& out,
                                                          const at::Tensor& sums) const {
    const auto wide = wide_dtype(query);
    const auto of_pairs = scores(), weights = powers(of_pairs, sums), grad_out = given.to(wide);
    const auto grad_weights = dropped(grad_out.matmul(for_each_head(value, query).mT()));
    const auto dots = (grad_out * out.to(wide)).sum(-1, /*keepdim=*/true);
    auto grad_scores = weights * (grad_weights - dots);
    if (soft_cap != 0) {  // which those that are not seen have not
      const auto slopes = 1 - (of_pairs / soft_cap).square();
      grad_scores = grad_scores * slopes.masked_fill(of_pairs == -INFINITY, 0);
    }
    const auto grad_query = grad_scores.matmul(for_each_head(key, query)) * scale;
    const auto grad_key = grad_scores.mT().matmul(query.to(wide)) * scale;
    return {grad_query.to(query.scalar_type()), sum_of_heads(grad_key, key),
            sum_of_heads(dropped(weights).mT().matmul(grad_out), value)};
  }
};

// Draws the key of a forward, which it returns for the backward.
at::Tensor draw(Dropout& dropout, const at::Tensor& query) {
  if (dropout.share == 0) return at::empty({0}, query.options());
  dropout.key = Dropout::draw_key();
  return at::scalar_tensor(dropout.key, query.options().dtype(at::kLong));
}

// --- scaled_dot_product_attention in one piece --------------------------------------------------

// Of dropout, only its key is still to come.
Attention attention_of(Arguments arguments, size_t query, size_t bias, size_t dropout,
                       size_t causal, size_t scale) {
  const auto &of_query = arguments[query].toTensor(), &of_key = arguments[query + 1].toTensor();
  Attention found{.query = of_query,
                  .key = of_key,
                  .value = arguments[query + 2].toTensor(),
                  .bias = optional_tensor(arguments[bias]),
                  .scale = scale_of(arguments[scale], of_query),
                  .dropout = {.share = arguments[dropout].toDouble(),
                              .queries = of_query.size(2),
                              .keys = of_key.size(2)}};
  if (arguments[causal].toBool()) {
    const auto pairs = {found.query.size(2), found.key.size(2)};
    found.unseen = at::ones(pairs, found.query.options().dtype(at::kBool)).triu(1);
  }
  return found;
}

void forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 8);
  auto attention = attention_of(arguments, 0, 3, 4, 5, 7);
  const auto drawn = draw(attention.dropout, attention.query);
  const auto [out, sums] = attention.forward();
  const auto none = at::empty({0}, attention.query.options());
  torch::jit::push(*stack, out, sums, none, none, attention.query.size(2), attention.key.size(2),
                   drawn, none, none);
}

void backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, 17);
  auto attention = attention_of(arguments, 1, 4, 12, 13, 16);
  attention.dropout.key = key_of(attention.dropout.share, arguments[kKeyOfBackward]);
  const auto [of_query, of_key, of_value] =
      attention.backward(arguments[0].toTensor(), arguments[6].toTensor(), arguments[7].toTensor());
  torch::jit::push(*stack, of_query, of_key, of_value, at::Tensor());
}

// --- FlashAttention, by its names in ATen -------------------------------------------------------

constexpr int64_t kQueries = 1024;  // whose scores are there at a time

// Some rows of every sequence.
struct Rows {
  int64_t first, count;

  at::Tensor of(const at::Tensor& tensor) const {
    return as_heads(tensor.narrow(tensor.dim() - 3, first, count));
  }
  at::Tensor of_sums(const at::Tensor& sums) const {
    const auto own = sums.narrow(-1, first, count);
    return own.dim() == 2 ? own.unsqueeze(0) : own;
  }
};

Rows rows_of(const at::Tensor& ends, int64_t document, const at::Tensor& tensor) {
  if (!ends.defined()) return {0, tensor.size(-3)};
  const auto first = ends[document].item<int64_t>(), end = ends[document + 1].item<int64_t>();
  TORCH_CHECK(0 <= first && first <= end && end <= tensor.size(-3), "FlashAttention's document ",
              document, " has the rows from ", first, " to ", end,
              ", expected ends that ascend from 0 to at most ", tensor.size(-3),
              ", the number of rows");
  return {first, end - first};
}

// A call's documents, or its sequences as if they were one.
class Flash {
 public:
  Flash(Arguments arguments, const FlashPlaces& at)
      : query(arguments[at.query].toTensor()),
        key(arguments[at.query + 1].toTensor()),
        value(arguments[at.query + 2].toTensor()),
        ends_of_queries_(optional_tensor(arguments[at.cum_seq_q])),
        ends_of_keys_(optional_tensor(arguments[at.cum_seq_q + 1])),
        scale_(scale_of(arguments[at.scale], query)),
        soft_cap_(soft_cap_of(arguments, at)),
        before_(window_of(arguments[at.window_left])),
        after_(is_causal(arguments, at) ? 0 : window_of(arguments[at.window_right])) {
    dropout = {.share = arguments[at.dropout_p].toDouble(),
               .queries = query.size(-3),
               .keys = key.size(-3)};
  }

  // use(attention, rows of queries, rows of keys), for some queries at a time.
  template <class Use>
  void for_each(Use use) const {
    const int64_t documents = ends_of_queries_.defined() ? ends_of_queries_.numel() - 1 : 1;
    for (int64_t i = 0; i < documents; ++i) {
      const auto queries = rows_of(ends_of_queries_, i, query),
                 keys = rows_of(ends_of_keys_, i, key);
      for (int64_t first = 0; first < queries.count; first += kQueries) {
        const auto count = std::min(kQueries, queries.count - first);
        const Rows some{queries.first + first, count};
        const auto own = first + keys.count - queries.count;  // the last query is the last key's
        const auto oldest = before_ < 0 ? 0 : std::clamp<int64_t>(own - before_, 0, keys.count);
        const auto end =
            after_ < 0 ? keys.count : std::clamp<int64_t>(own + count + after_, oldest, keys.count);
        const Rows seen{keys.first + oldest, end - oldest};
        use(Attention{some.of(query), seen.of(key), seen.of(value), at::Tensor(),
                      unseen(own - oldest, count, seen.count), scale_, soft_cap_, dropout,
                      some.first, seen.first},
            some, seen);
      }
    }
  }

  const at::Tensor query, key, value;
  Dropout dropout;

 private:
  // first: the key whose place is that of the first query.
  at::Tensor unseen(int64_t first, int64_t queries, int64_t keys) const {
    const auto options = query.options().dtype(at::kLong);
    const auto apart =
        at::arange(keys, options) - at::arange(first, first + queries, options).unsqueeze(1);
    auto found = at::zeros_like(apart, options.dtype(at::kBool));
    if (after_ >= 0) found = found.logical_or(apart > after_);
    if (before_ >= 0) found = found.logical_or(apart < -before_);
    return found;
  }

  at::Tensor ends_of_queries_, ends_of_keys_;
  double scale_, soft_cap_;
  int64_t before_, after_;
};

void flash_forward(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  for (size_t i = kFlashForward.window_right + 1; i < arguments.size(); ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(arguments[i].isNone() || arguments[i].isDouble(),
                                "the CPU has no FlashAttention with ",
                                handle.schema().arguments()[i].name());
  }
  Flash flash(arguments, kFlashForward);
  const auto drawn = draw(flash.dropout, flash.query);
  auto shape = flash.query.sizes().vec();
  shape.back() = flash.value.size(-1);
  const auto out = at::zeros(shape, flash.query.options());
  shape = as_heads(flash.query).sizes().slice(0, 3).vec();
  if (flash.query.dim() == 3) shape.erase(shape.begin());
  const auto sums = at::zeros(shape, flash.query.options().dtype(wide_dtype(flash.query)));
  flash.for_each([&](const Attention& attention, const Rows& queries, const Rows&) {
    const auto [mixed, sum] = attention.forward();
    queries.of(out).copy_(mixed);
    queries.of_sums(sums).copy_(sum);
  });
  const auto none = at::empty({0}, flash.query.options());
  torch::jit::push(*stack, out, sums, drawn, none, none.clone());
}

void flash_backward(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, handle.schema().arguments().size());
  const auto &grad_out = arguments[0].toTensor(), &out = arguments[4].toTensor(),
             &sums = arguments[5].toTensor();
  Flash flash(arguments, kFlashBackward);
  flash.dropout.key = key_of(flash.dropout.share, arguments[kKeyOfFlashBackward]);
  const auto of_query = at::zeros_like(flash.query), of_key = at::zeros_like(flash.key),
             of_value = at::zeros_like(flash.value);
  flash.for_each([&](const Attention& attention, const Rows& queries, const Rows& keys) {
    const auto [grad_query, grad_key, grad_value] =
        attention.backward(queries.of(grad_out), queries.of(out), queries.of_sums(sums));
    queries.of(of_query).copy_(grad_query);
    keys.of(of_key).add_(grad_key);
    keys.of(of_value).add_(grad_value);
  });
  torch::jit::push(*stack, of_query, of_key, of_value);
}

template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

}  // namespace

void register_all(torch::Library& aten, torch::Library& ours) {
  aten.impl(kForward, boxed<&forward>());
  aten.impl(kBackward, boxed<&backward>());
  aten.impl(kFlashForwardName, boxed<&flash_forward>());
  aten.impl(kFlashBackwardName, boxed<&flash_backward>());
  ours.impl(kCappedForwardName, boxed<&flash_forward>());
  ours.impl(kCappedBackwardName, boxed<&flash_backward>());
}

}  // namespace ditorch::attention::on_host

void ditorch::attention::register_on_host(torch::Library& aten, torch::Library& ours) {
  on_host::register_all(aten, ours);
}
