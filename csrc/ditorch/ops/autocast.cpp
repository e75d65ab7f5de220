// Autocast for the device: torch's own lists of which operators run in low precision, which in
// float32, and which in the widest dtype of their arguments.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/register.h"

namespace ditorch {
namespace {

using namespace at;  // torch's lists name ATen's types bare

// binary_cross_entropy of probabilities is unsafe in low precision; torch refuses it everywhere.
Tensor binary_cross_entropy_banned(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                   int64_t) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
              "autocast; use binary_cross_entropy_with_logits or BCEWithLogitsLoss");
}

}  // namespace

void register_autocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  auto* all = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFallthrough());

  auto& m = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
#define DITORCH_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(DITORCH_LOWER)
#undef DITORCH_LOWER
#define DITORCH_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(DITORCH_FP32)
#undef DITORCH_FP32
#define DITORCH_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(DITORCH_FP32_DTYPE)
#undef DITORCH_FP32_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define DITORCH_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(DITORCH_PROMOTE)
#undef DITORCH_PROMOTE
  m.impl("binary_cross_entropy", TORCH_FN(binary_cross_entropy_banned));
}

}  // namespace ditorch
