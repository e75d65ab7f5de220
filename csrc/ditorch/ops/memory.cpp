#include "ops/memory.h"

#include <ATen/Context.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstddef>
#include <cstring>

#include "ops/charge.h"
#include "ops/host_arguments.h"
#include "ops/map.h"
#include "ops/strict.h"
#include "runtime/allocator.h"
#include "runtime/copy.h"
#include "runtime/pinned.h"
#include "runtime/stream.h"

namespace ditorch {
namespace {

constexpr c10::DispatchKeySet kChipKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : chip_device(current_device());
}

void check_dense(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!layout || *layout == c10::kStrided, "the device ", vendor().devices.front().library,
              " holds dense tensors only, not ", *layout, " ones; keep such tensors on the CPU");
  TORCH_CHECK(!pin_memory || !*pin_memory, "Only dense CPU tensors can be pinned");
}

// torch.use_deterministic_algorithms asks for NaN or the largest integer where nothing was written.
bool fills_what_is_new() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  check_dense(layout, pin_memory);
  c10::DeviceGuard guard(device_or_current(device));
  at::Tensor made = at::detail::empty_generic(size, chip_allocator(), kChipKeys,
                                              c10::dtype_or_default(dtype), format);
  return fills_what_is_new() ? at::native::fill_empty_deterministic_(made) : made;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_dense(layout, pin_memory);
  c10::DeviceGuard guard(device_or_current(device));
  at::Tensor made = at::detail::empty_strided_generic(size, stride, chip_allocator(), kChipKeys,
                                                      c10::dtype_or_default(dtype));
  return fills_what_is_new() ? at::native::fill_empty_deterministic_(made) : made;
}

// at::native would grow a storage with the host's memcpy, which may not reach the chip's memory; so
// it finds the storage large enough.
void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes > storage.nbytes() && storage.resizable()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, bytes);
  }
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  const auto bytes = static_cast<int64_t>(self.storage().nbytes());
  grow(self.storage(), at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(),
                                                                  self.storage_offset()));
  at::native::resize_(self, size, format);
  return fills_what_is_new() ? at::native::fill_resize_deterministic_(self, bytes) : self;
}

at::Tensor& set_part_of_storage(at::Tensor& self, at::Storage source, int64_t offset,
                                c10::IntArrayRef size, c10::IntArrayRef stride) {
  const auto itemsize = self.dtype().itemsize();
  if (offset >= 0 && source.device().type() == kChip) {
    grow(source, stride.empty() ? at::detail::computeStorageNbytesContiguous(size, itemsize, offset)
                                : at::detail::computeStorageNbytes(size, stride, itemsize, offset));
  }
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, elements, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocate_on(self.device().index(), 0),
                       chip_allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

bool is_dense(const at::Tensor& tensor) {
  if (tensor.device().type() == kChip) return tensor.layout() == c10::kStrided;
  const c10::DispatchKeySet dense(c10::DispatchKey::CPU);
  return tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(dense);
}

// Whether `self.data = from` is allowed. Module.to assigns so and keeps its Parameters, with all
// that refers to them; where it is not allowed, it makes new ones. torch allows it between dense
// tensors of the devices it knows, and leaves this operator to the others.
bool may_share_data(const at::Tensor& self, const at::Tensor& from) {
  return is_dense(self) && is_dense(from);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::getDeviceAllocator(kChip)->recordStream(self.storage().data_ptr(), stream);
}

// --- copies ---------------------------------------------------------------------------------

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  return is_plain(a) && is_plain(b) && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
}

at::Tensor empty_on_host(c10::IntArrayRef size, c10::ScalarType dtype) {
  return at::empty(size, at::TensorOptions(dtype));
}

// Within the chip, charged like any operator; bytes alone need no kernel.
void copy_within_chip(const at::Tensor& destination, const at::Tensor& source) {
  const auto device = destination.device().index();
  const bool is_bytes = are_alike(destination, source) && !destination.is_alias_of(source);
  if (!host_reaches(device) && is_bytes) {
    return copy_on_chip(device, destination.mutable_data_ptr(), source.const_data_ptr(),
                        source.nbytes());
  }
  Charge charge(device);
  charge.add(source);
  charge.add(destination);
  const ditorch_context context{sizeof(context), device, current_handle(device)};
  const auto status = map_copy(context, destination, source);
  if (status != DITORCH_NOT_IMPLEMENTED) {
    check(status, "copy_");
    return charge.pay("copy_", false);
  }
  const bool on_host = !is_bytes && destination.numel() > 0;
  if (on_host) {
    refuse_host(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""),
                {destination, source});
  }
  HostArguments host(device);
  const auto target = host.lend(destination, /*written=*/true);
  target.copy_(host.lend(source, /*written=*/false));
  host.write_back();
  charge.pay("copy_", on_host);
}

// The host converts and lays out what it sends; the chip spreads what it receives.
void copy_from_host(const at::Tensor& destination, const at::Tensor& source) {
  const auto sent = source.to(destination.scalar_type())
                        .expand(destination.sizes())
                        .contiguous()
                        .resolve_conj()
                        .resolve_neg();
  const bool direct = is_plain(destination);
  const auto landing = direct ? destination
                              : empty(destination.sizes(), destination.scalar_type(), {},
                                      destination.device(), {}, {});
  copy_to_chip(destination.device().index(), landing.mutable_data_ptr(), sent.const_data_ptr(),
               sent.nbytes());
  if (!direct) copy_within_chip(destination, landing);
}

// The chip gathers what it sends; the host converts and spreads it. It is not waited for only where
// the bytes go straight to pinned memory, as torch has it.
void copy_back(const at::Tensor& destination, const at::Tensor& source, bool non_blocking = false) {
  auto sent = source;
  if (!is_plain(source)) {
    sent = empty(source.sizes(), source.scalar_type(), {}, source.device(), {}, {});
    copy_within_chip(sent, source);
  }
  const bool direct = are_alike(destination, sent);
  const auto landing = direct ? destination : empty_on_host(source.sizes(), source.scalar_type());
  const auto device = source.device().index();
  const bool unawaited =
      non_blocking && direct && use_pinned(landing.const_data_ptr(), current_stream(device));
  copy_to_host(device, landing.mutable_data_ptr(), sent.const_data_ptr(), sent.nbytes(), unawaited);
  if (!direct) destination.copy_(landing);
}

// The runtime ABI copies within one chip only.
void copy_between_chips(const at::Tensor& destination, const at::Tensor& source) {
  const auto landing = empty_on_host(source.sizes(), source.scalar_type());
  copy_back(landing, source);
  copy_from_host(destination, landing);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool to_chip = self.device().type() == kChip;
  const bool from_chip = source.device().type() == kChip;
  c10::DeviceGuard guard((to_chip ? self : source).device());
  TORCH_CHECK((to_chip || self.is_cpu()) && (from_chip || source.is_cpu()), "cannot copy from ",
              source.device(), " to ", self.device(), "; copy through the CPU");
  TORCH_CHECK(self.layout() == c10::kStrided && source.layout() == c10::kStrided, "the device ",
              vendor().devices.front().library,
              " holds dense tensors only; keep sparse tensors on the CPU");
  if (to_chip && from_chip && self.device() != source.device()) {
    copy_between_chips(self, source);
  } else if (to_chip && from_chip) {
    copy_within_chip(self, source);
  } else if (to_chip) {
    copy_from_host(self, source);
  } else {
    copy_back(self, source, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  auto target = destination;
  return copy(target, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  auto target = destination;
  target.resize_(self.sizes());
  return copy(target, self, false);
}

// The one element, straight into the host's memory: no tensor is made on the way.
at::Scalar read_scalar(const at::Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "_local_scalar_dense: Empty tensor not supported");
  const auto element = self.resolve_conj().resolve_neg();
  alignas(c10::complex<double>) std::byte value[sizeof(c10::complex<double>)];
  copy_to_host(element.device().index(), value, element.const_data_ptr(), element.element_size());
  at::Scalar scalar;
  AT_DISPATCH_V2(element.scalar_type(), "item", AT_WRAP([&] {
                   scalar_t typed;
                   std::memcpy(&typed, value, sizeof typed);
                   scalar = typed;
                 }),
                 AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), AT_EXPAND(AT_FLOAT8_TYPES),
                 AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), at::kComplexHalf, at::kHalf, at::kBFloat16,
                 at::kBool);
  return scalar;
}

}  // namespace

void register_memory_operators(torch::Library& library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part_of_storage));
  library.impl("set_", TORCH_FN(set_empty));
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_share_data));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("copy_", TORCH_FN(copy));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(read_scalar));
}

}  // namespace ditorch
