// What torch asks a PrivateUse1 device about itself.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "runtime/allocator.h"
#include "runtime/copy.h"
#include "runtime/device.h"
#include "runtime/generator.h"
#include "runtime/pinned.h"
#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

class ChipHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(vendor().devices.size());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchange_device(device);
  }
  at::Device getDeviceFromPtr(void*) const override { return chip_device(current_device()); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = allocate_on(storage.device().index(), bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) {
      copy_on_chip(storage.device().index(), fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

void register_hooks() {
  register_pinned_allocator();
  at::RegisterPrivateUse1HooksInterface(new ChipHooks());
}

}  // namespace ditorch
