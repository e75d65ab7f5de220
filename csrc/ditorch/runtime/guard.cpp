// Devices, streams and events for c10: what torch.Stream, torch.Event, torch.accelerator and the
// autograd engine call.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

ditorch_event* event_of(void* event) { return static_cast<ditorch_event*>(event); }

class ChipGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kChip; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return chip_device(device.has_index() ? exchange_device(device.index()) : current_device());
  }
  c10::Device getDevice() const override { return chip_device(current_device()); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(vendor().devices.size());
  }

  // Every dtype: operators without a vendor kernel run on the host.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index(device));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(index(device), priority);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return pool_stream(index(device), high_priority ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }

  bool queryStream(const c10::Stream& stream) const override {
    auto status = vendor().runtime->stream_query(stream.device_index(), handle_of(stream));
    if (status != DITORCH_NOT_READY) check(status, "query a stream");
    return status == DITORCH_OK;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check(vendor().runtime->stream_synchronize(stream.device_index(), handle_of(stream)),
          "synchronize a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    check(vendor().runtime->device_synchronize(device), "synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of device ",
                static_cast<int>(device), " cannot be recorded on a stream of device ",
                static_cast<int>(stream.device_index()));
    auto* handle = event_of(*event);
    if (!handle) {
      bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
      check(vendor().runtime->event_create(stream.device_index(), timed, &handle),
            "create an event");
      *event = handle;
    }
    check(vendor().runtime->event_record(stream.device_index(), handle, handle_of(stream)),
          "record an event");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;  // never recorded: nothing to wait for
    check(vendor().runtime->stream_wait_event(stream.device_index(), handle_of(stream),
                                              event_of(event)),
          "wait for an event");
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto status = vendor().runtime->event_query(current_device(), event_of(event));
    if (status != DITORCH_NOT_READY) check(status, "query an event");
    return status == DITORCH_OK;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    check(vendor().runtime->event_synchronize(current_device(), event_of(event)),
          "synchronize an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event) vendor().runtime->event_destroy(device, event_of(event));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex device) const override {
    TORCH_CHECK(start && end, "both events must be recorded before elapsed_time");
    int64_t elapsed_ns = 0;
    check(vendor().runtime->event_elapsed_ns(device, event_of(start), event_of(end), &elapsed_ns),
          "measure the time between two events");
    return static_cast<double>(elapsed_ns) * 1e-6;  // torch counts milliseconds
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    c10::getDeviceAllocator(kChip)->recordStream(pointer, stream);
  }

 private:
  static c10::DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

}  // namespace

void register_guard() {
  static auto* guard = new ChipGuard();
  c10::impl::DeviceGuardImplRegistrar registrar(kChip, guard);
}

}  // namespace ditorch
