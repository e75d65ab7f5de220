#include "streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "core/communicator.h"
#include "core/text.h"
#include "timeline.h"

namespace dicomm {

namespace {

constexpr std::chrono::milliseconds kLongestNap{1};  // between two looks at a chip

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

// Made when it is first asked for.
class StreamOfDevice {
 public:
  c10::Stream of(c10::Device device) {
    std::lock_guard lock(mutex_);
    auto found = streams_.find(device);
    if (found == streams_.end()) found = streams_.emplace(device, new_stream(device)).first;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::Device, c10::Stream> streams_;
};

class WorkUntil final : public ChipWork {
 public:
  explicit WorkUntil(StreamMark mark) : mark_(std::move(mark)) {}
  bool done() override { return mark_.is_reached(); }

 private:
  StreamMark mark_;
};

}  // namespace

c10::Stream communication_stream(c10::Device device) {
  static StreamOfDevice streams;
  return streams.of(device);
}

c10::Stream sending_stream(c10::Device device) {
  static StreamOfDevice streams;
  return streams.of(device);
}

StreamMark StreamMark::here(c10::Device device) {
  if (device.is_cpu()) return {};
  return of(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

StreamMark StreamMark::here_behind_the_host(c10::Device device) {
  return works_behind_the_host(device) ? here(device) : StreamMark();
}

StreamMark StreamMark::of(c10::Stream stream) {
  StreamMark mark;
  mark.event_ = std::make_shared<c10::Event>(stream.device_type());
  mark.event_->record(stream);
  return mark;
}

// Any thread may ask, one that never used the device too.
bool StreamMark::is_reached() const {
  if (!event_) return true;
  const c10::DeviceGuard guard(event_->device());
  return event_->query();
}

bool StreamMark::is_surely_reached() const noexcept {
  try {
    return is_reached();
  } catch (const std::exception&) {
    return false;
  }
}

void StreamMark::hold_current_stream() const {
  if (!event_) return;
  const c10::impl::VirtualGuardImpl guard(event_->device_type());
  event_->block(guard.getStream(event_->device()));
}

bool StreamMark::wait(std::chrono::nanoseconds timeout, const char* what,
                      const std::function<bool()>& gives_up) const {
  const auto begun = std::chrono::steady_clock::now();
  while (!is_reached()) {
    if (gives_up()) return false;
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (waited > timeout)
      throw TimeoutError(std::string(what) + " after " + seconds(waited) +
                         "; this rank's chip has yet to get there");
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(waited / 8, kLongestNap));
  }
  return true;
}

std::shared_ptr<ChipWork> StreamMark::work() const {
  return event_ ? std::make_shared<WorkUntil>(*this) : nullptr;
}

void keep_for_current_stream(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (!works_behind_the_host(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(device));
}

}  // namespace dicomm
