#include "staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include "core/host.h"
#include "host_memory.h"
#include "timeline.h"

namespace dicomm {

namespace {

void check_reachable(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.numel() == 0) return;
  TORCH_CHECK(host_can_read(tensor.const_data_ptr()), "dicomm: the device-direct strategy needs ",
              "memory that the host can touch, which ", tensor.device(),
              " does not give; set DICOMM_STRATEGY=cpu-mediated");
}

// Some of a contiguous tensor's bytes, as a tensor.
at::Tensor piece(const at::Tensor& tensor, std::size_t begin, std::size_t length) {
  return tensor.view({-1}).view(at::kByte).narrow(0, static_cast<std::int64_t>(begin),
                                                  static_cast<std::int64_t>(length));
}

}  // namespace

Strategy parse_strategy(const std::string& name) {
  for (const Strategy strategy : {Strategy::device_direct, Strategy::cpu_mediated})
    if (name == name_of(strategy)) return strategy;
  TORCH_CHECK_VALUE(false, "dicomm: strategy is '", name,
                    "', expected 'device-direct' or 'cpu-mediated'");
}

const char* name_of(Strategy strategy) {
  return strategy == Strategy::device_direct ? "device-direct" : "cpu-mediated";
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

Staged::Staged(const at::Tensor& tensor, Strategy strategy, Access access)
    : Staged(uncopied(tensor, strategy, access)) {
  if (must_copy_in_) fill(0, bytes(), /*non_blocking=*/false);
}

Staged Staged::uncopied(const at::Tensor& tensor, Strategy strategy, Access access) {
  const bool on_host = strategy == Strategy::cpu_mediated && !tensor.is_cpu();
  Staged staged(tensor, on_host, access, Later{});
  check_reachable(staged.bytes_);
  return staged;
}

Staged Staged::on_chip(const at::Tensor& tensor, Access access) {
  return {tensor, /*on_host=*/false, access, Later{}};
}

Staged Staged::on_demand(const at::Tensor& tensor, Access access) {
  Staged staged;
  staged.tensor_ = staged.bytes_ = tensor;
  staged.must_copy_back_ = access != Access::read;
  return staged;
}

void Staged::bring_to_host() {
  bytes_ = host_tensor_like(tensor_);
  if (!must_copy_back_) copy_behind_the_host(0, bytes());
}

Staged::Staged(const at::Tensor& tensor, bool on_host, Access access, Later) : access_(access) {
  TORCH_CHECK(tensor.layout() == c10::kStrided, "dicomm: dense tensors expected, got layout ",
              tensor.layout());
  const at::NoGradGuard no_grad;
  tensor_ = access == Access::read ? plain(tensor) : tensor;
  if (!on_host && is_plain(tensor_)) {
    bytes_ = tensor_;
    // One that shares its memory until it is written to gets its own now, on the caller's stream.
    if (access != Access::read) bytes_.mutable_data_ptr();
  } else {
    bytes_ = on_host ? host_tensor_like(tensor)
                     : at::empty(tensor.sizes(), tensor.options().requires_grad(false));
    must_copy_in_ = access != Access::write;
    must_copy_back_ = access != Access::read;
  }
}

void Staged::copy_back() const { copy_back(0, bytes()); }

void Staged::copy_back(std::size_t begin, std::size_t length) const {
  if (!must_copy_back_) return;
  const c10::InferenceMode no_grad;  // in which tensors made in that mode may be written to, too
  const bool is_behind = works_behind_the_host(tensor_.device());
  if (is_plain(tensor_) && length != bytes())
    piece(tensor_, begin, length).copy_(piece(bytes_, begin, length), is_behind);
  else if (begin + length == bytes())
    tensor_.copy_(bytes_, is_behind);
  if (!is_behind) return;
  keep_for_current_stream(tensor_);
  keep_for_current_stream(bytes_);
  keep_host_memory_until(bytes_, StreamMark::here(tensor_.device()));
}

void Staged::copy_in(std::size_t begin, std::size_t length, const StreamMark& given) {
  if (!bytes_.is_cpu()) there_ = given;
  if (!must_copy_in_) return;
  const c10::Device chip = tensor_.device();
  if (!works_behind_the_host(chip)) return fill(begin, length, /*non_blocking=*/false);
  const c10::StreamGuard guard(sending_stream(chip));
  given.hold_current_stream();
  copy_behind_the_host(begin, length);
}

void Staged::copy_behind_the_host(std::size_t begin, std::size_t length) {
  fill(begin, length, /*non_blocking=*/true);
  keep_for_current_stream(tensor_);
  keep_for_current_stream(bytes_);
  there_ = StreamMark::here(tensor_.device());
  keep_host_memory_until(bytes_, there_);
}

void Staged::fill(std::size_t begin, std::size_t length, bool non_blocking) const {
  const at::NoGradGuard no_grad;
  if (length == bytes())
    bytes_.copy_(tensor_, non_blocking);
  else
    piece(bytes_, begin, length).copy_(piece(tensor_, begin, length), non_blocking);
}

}  // namespace dicomm
