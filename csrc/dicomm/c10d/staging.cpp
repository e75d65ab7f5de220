#include "staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <sys/uio.h>
#include <unistd.h>

namespace dicomm {

namespace {

// Asks the kernel, which answers instead of crashing.
bool host_can_read(void* address) {
  char byte;
  const iovec local{&byte, 1};
  const iovec remote{address, 1};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

void check_reachable(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.numel() == 0) return;
  TORCH_CHECK(host_can_read(tensor.data_ptr()), "dicomm: the device-direct strategy needs memory ",
              "that the host can touch, which ", tensor.device(),
              " does not give; set DICOMM_STRATEGY=cpu-mediated");
}

at::Tensor contiguous_copy(const at::Tensor& tensor, c10::Device device, Access access) {
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options().device(device).requires_grad(false));
  if (access != Access::write) copy.copy_(tensor);
  return copy;
}

}  // namespace

Strategy parse_strategy(const std::string& name) {
  if (name == "device-direct") return Strategy::device_direct;
  TORCH_CHECK_VALUE(name == "cpu-mediated", "dicomm: strategy is '", name,
                    "', expected 'device-direct' or 'cpu-mediated'");
  return Strategy::cpu_mediated;
}

Staged::Staged(const at::Tensor& tensor, Strategy strategy, Access access)
    : tensor_(tensor), must_copy_back_(false) {
  TORCH_CHECK(tensor.layout() == c10::kStrided, "dicomm: dense tensors expected, got layout ",
              tensor.layout());
  const at::NoGradGuard no_grad;
  const c10::Device device = strategy == Strategy::cpu_mediated ? c10::kCPU : tensor.device();
  if (tensor_.device() == device && tensor_.is_contiguous()) {
    bytes_ = tensor_;
  } else {
    bytes_ = contiguous_copy(tensor_, device, access);
    must_copy_back_ = access != Access::read;
  }
  check_reachable(bytes_);
}

void Staged::copy_back() const {
  if (!must_copy_back_) return;
  const at::NoGradGuard no_grad;
  tensor_.copy_(bytes_);
}

}  // namespace dicomm
