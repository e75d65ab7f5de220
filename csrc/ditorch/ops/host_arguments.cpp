#include "ops/host_arguments.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>

#include <algorithm>

#include "runtime/copy.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

// A tensor that shows `storage` the way `like` shows its own.
at::Tensor show(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto shown = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                        c10::DispatchKeySet(key), like.dtype());
  auto* impl = shown.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return shown;
}

void release_storage(void* owner) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(owner));
}

// The memory of a device storage under the CPU's name. It keeps the device's storage alive, should
// a kernel hold on to its CPU tensor.
c10::DataPtr borrow(const c10::Storage& device) {
  auto* memory = const_cast<void*>(device.data());
  auto* owner = c10::Storage(device).unsafeReleaseStorageImpl();
  return {memory, owner, &release_storage, c10::Device(c10::kCPU)};
}

void refuse_unless_dense(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == c10::kStrided && !tensor.is_quantized() && !tensor.is_nested(),
              "the device ", vendor().devices.front().library,
              " holds dense tensors only, but this operator made a tensor that is ",
              tensor.is_quantized() ? "quantized" : c10::str(tensor.layout()),
              "; keep such tensors on the CPU");
}

}  // namespace

HostArguments::HostArguments(c10::DeviceIndex device, Needs needs)
    : device_(device), staged_(needs == Needs::elements && !host_reaches(device)) {}

std::optional<AllocateOnChip> HostArguments::results_on_chip() const {
  if (!host_reaches(device_)) return std::nullopt;
  return std::optional<AllocateOnChip>(std::in_place, device_);
}

// A lazy clone shares its memory until one of the two is written to, which then gets its own.
void HostArguments::part_from_clones(const c10::Storage& device) {
  if (!c10::impl::cow::is_cow_data_ptr(device.data_ptr())) return;
  device.mutable_data();
  if (staged_) return;
  for (const auto& known : storages_) {
    if (known.device.is_alias_of(device)) known.host.set_data_ptr_noswap(borrow(device));
  }
}

c10::Storage HostArguments::host_storage(const c10::Storage& device) {
  for (const auto& known : storages_) {
    if (known.device.is_alias_of(device)) return known.host;
  }
  const auto bytes = device.nbytes();
  auto memory = staged_ ? c10::GetCPUAllocator()->allocate(bytes) : borrow(device);
  if (staged_) copy_to_host(device_, memory.get(), device.data(), bytes);
  c10::Storage host(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                    c10::GetCPUAllocator(), device.resizable());
  storages_.push_back({device, host});
  return host;
}

at::Tensor HostArguments::lend(const at::Tensor& tensor, bool written) {
  if (!tensor.defined() || tensor.device().type() != kChip) return tensor;
  if (written) part_from_clones(tensor.storage());
  for (auto& known : tensors_) {
    if (!known.device.is_same(tensor)) continue;
    known.written |= written;
    return known.host;
  }
  refuse_unless_dense(tensor);
  auto host = show(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
  tensors_.push_back({tensor, host, written});
  return host;
}

c10::IValue HostArguments::lend(const c10::IValue& value, bool written) {
  if (value.isTensor()) return lend(value.toTensor(), written);
  if (value.isTensorList()) {
    c10::List<at::Tensor> host;
    auto tensors = value.toTensorList();
    host.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) host.push_back(lend(tensor, written));
    return host;
  }
  // By its structure: TorchScript makes a type of its own for such a list, equal but not the same.
  if (value.isList() && *value.toList().elementType() == *c10::OptionalType::ofTensor()) {
    c10::List<std::optional<at::Tensor>> host;
    for (const c10::IValue& tensor : value.toListRef()) {
      host.push_back(tensor.isNone() ? std::nullopt
                                     : std::make_optional(lend(tensor.toTensor(), written)));
    }
    return host;
  }
  if (value.isDevice() && value.toDevice().type() == kChip) return c10::Device(c10::kCPU);
  return value;
}

void HostArguments::write_back_aliased(Storages& storages) {
  auto& [device, host] = storages;
  if (host.data() == device.data() && host.nbytes() == device.nbytes()) return;
  auto fresh = host.set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  fresh.unsafe_set_device(chip_device(device_));
  device.set_nbytes(host.nbytes());
  device.set_data_ptr_noswap(std::move(fresh));
  host.set_data_ptr_noswap(borrow(device));
}

void HostArguments::write_back_staged(Storages& storages) {
  auto& [device, host] = storages;
  auto [first, last] = written_to(host);
  if (host.nbytes() != device.nbytes()) {
    device.set_data_ptr_noswap(allocate_on(device_, host.nbytes()));
    device.set_nbytes(host.nbytes());
    first = 0;
    last = host.nbytes();
  }
  if (first >= last) return;
  copy_to_chip(device_, static_cast<char*>(device.mutable_data()) + first,
               static_cast<const char*>(host.data()) + first, last - first);
}

// From the first to the last byte of the tensors that the kernel wrote to, and no more of the
// storage: another thread or stream may be writing to the rest.
HostArguments::Bytes HostArguments::written_to(const c10::Storage& host) const {
  Bytes bytes{host.nbytes(), 0};
  for (const auto& known : tensors_) {
    const auto& tensor = known.host;
    if (!known.written || tensor.numel() == 0 || !tensor.storage().is_alias_of(host)) continue;
    const auto itemsize = tensor.dtype().itemsize();
    const auto offset = static_cast<size_t>(tensor.storage_offset());
    bytes.first = std::min(bytes.first, offset * itemsize);
    bytes.last = std::max(bytes.last, at::detail::computeStorageNbytes(
                                          tensor.sizes(), tensor.strides(), itemsize, offset));
  }
  return bytes;
}

void HostArguments::write_back() {
  if (std::none_of(tensors_.begin(), tensors_.end(),
                   [](const auto& known) { return known.written; })) {
    return;
  }
  for (auto& storages : storages_) {
    staged_ ? write_back_staged(storages) : write_back_aliased(storages);
  }
  for (auto& [device, host, written] : tensors_) {
    auto* impl = device.unsafeGetTensorImpl();
    auto storage = device_storage(host.storage());
    if (!storage.is_alias_of(device.storage())) impl->set_storage_keep_dtype(storage);
    if (device.sizes() != host.sizes() || device.strides() != host.strides() ||
        device.storage_offset() != host.storage_offset()) {
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
    impl->_set_conj(host.is_conj());
    impl->_set_neg(host.is_neg());
  }
}

c10::Storage HostArguments::device_storage(const c10::Storage& host) {
  for (const auto& known : storages_) {
    if (known.host.is_alias_of(host)) return known.device;
  }
  const auto bytes = host.nbytes();
  const bool is_fresh = owns_chip_memory(host.data_ptr());
  c10::DataPtr memory(nullptr, chip_device(device_));
  if (is_fresh) {
    memory = host.set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    memory.unsafe_set_device(chip_device(device_));
  } else if (bytes > 0) {  // host memory: the kernel's result, or a constant that it keeps
    memory = allocate_on(device_, bytes);
    copy_to_chip(device_, memory.get(), host.data(), bytes);
  }
  c10::Storage device(c10::Storage::use_byte_size_t(), bytes, std::move(memory), chip_allocator(),
                      /*resizable=*/true);
  if (is_fresh) host.set_data_ptr_noswap(borrow(device));
  storages_.push_back({device, host});
  return device;
}

at::Tensor HostArguments::restore(const at::Tensor& result) {
  if (!result.defined() || !result.device().is_cpu()) return result;
  for (const auto& known : tensors_) {
    if (known.host.is_same(result)) return known.device;
  }
  refuse_unless_dense(result);
  if (result._is_zerotensor()) {
    return at::zeros(result.sizes(), result.options().device(chip_device(device_)));
  }
  auto device = show(device_storage(result.storage()), c10::DispatchKey::PrivateUse1, result);
  tensors_.push_back({device, result, false});
  return device;
}

c10::IValue HostArguments::restore(const c10::IValue& value) {
  if (value.isTensor()) return restore(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> device;
    for (const at::Tensor& tensor : value.toTensorList()) device.push_back(restore(tensor));
    return device;
  }
  return value;
}

}  // namespace ditorch
