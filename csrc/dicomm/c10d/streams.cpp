#include "streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <unordered_map>

#include "timeline.h"

namespace dicomm {

namespace {

// A stream that nobody else uses; the current one of a device whose plugin makes no streams, and
// which therefore does everything in one order.
c10::Stream new_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  try {
    return guard.getStreamFromGlobalPool(device);
  } catch (const c10::Error&) {  // there is no way to ask
    return guard.getStream(device);
  }
}

}  // namespace

c10::Stream communication_stream(c10::Device device) {
  static std::mutex mutex;
  static std::unordered_map<c10::Device, c10::Stream> streams;
  std::lock_guard lock(mutex);
  auto found = streams.find(device);
  if (found == streams.end()) found = streams.emplace(device, new_stream(device)).first;
  return found->second;
}

StreamMark StreamMark::here(c10::Device device) {
  if (device.is_cpu()) return {};
  return of(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

StreamMark StreamMark::of(c10::Stream stream) {
  StreamMark mark;
  mark.event_ = std::make_shared<c10::Event>(stream.device_type());
  mark.event_->record(stream);
  return mark;
}

void StreamMark::hold_current_stream() const {
  if (!event_) return;
  const c10::impl::VirtualGuardImpl guard(event_->device_type());
  event_->block(guard.getStream(event_->device()));
}

// An emulated chip's work is done when it is submitted; only its clock is late.
void keep_for_current_stream(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (device.is_cpu() || Timeline(device).is_emulated()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(device));
}

}  // namespace dicomm
