#include "runtime/stream_uses.h"

#include <algorithm>

#include "runtime/stream.h"

namespace ditorch {

void StreamUses::add(c10::Stream stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

bool StreamUses::freed() {
  const auto& runtime = *vendor().runtime;
  for (auto stream : streams_) {
    const auto device = stream.device_index();
    ditorch_event* event = nullptr;
    if (runtime.event_create(device, 0, &event) != DITORCH_OK) {
      runtime.stream_synchronize(device, handle_of(stream));  // without a mark, the host waits
      continue;
    }
    if (runtime.event_record(device, event, handle_of(stream)) == DITORCH_OK) {
      marks_.push_back({device, event});
    } else {
      runtime.stream_synchronize(device, handle_of(stream));
      runtime.event_destroy(device, event);
    }
  }
  streams_.clear();
  return !marks_.empty();
}

bool StreamUses::finished(bool wait) {
  const auto& runtime = *vendor().runtime;
  while (!marks_.empty()) {
    const auto [device, event] = marks_.back();
    if (wait) {
      runtime.event_synchronize(device, event);
    } else if (runtime.event_query(device, event) == DITORCH_NOT_READY) {
      return false;
    }
    runtime.event_destroy(device, event);
    marks_.pop_back();
  }
  return true;
}

}  // namespace ditorch
