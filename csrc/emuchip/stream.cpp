// Streams: work is done at once, and each stream's clock tells when the chip will have done it.
#include "clock.h"
#include "device.h"
#include "error.h"
#include "runtime_entries.h"

namespace emuchip {
namespace {

constexpr int64_t kLongestWait_ns = 3'600'000'000'000;  // further off is a mistake, not a message

}  // namespace

ditorch_status device_synchronize(int32_t device) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  int64_t moment_ns = 0;
  {
    const std::lock_guard lock(found->mutex);
    moment_ns = found->latest_ready_at_ns;
  }
  hold_host_until(*found, moment_ns);
  return DITORCH_OK;
}

ditorch_status stream_create(int32_t device, int32_t /*priority*/, ditorch_stream** stream) {
  *stream = nullptr;
  if (!find_device(device)) return DITORCH_INVALID;
  *stream = new ditorch_stream;
  return DITORCH_OK;
}

ditorch_status stream_destroy(int32_t device, ditorch_stream* stream) {
  if (!find_device(device)) return DITORCH_INVALID;
  delete stream;
  return DITORCH_OK;
}

ditorch_status stream_query(int32_t device, ditorch_stream* stream) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  return found->stream(stream).ready_at_ns <= now_ns() ? DITORCH_OK : DITORCH_NOT_READY;
}

ditorch_status stream_synchronize(int32_t device, ditorch_stream* stream) {
  int64_t moment_ns = 0;
  if (stream_ready_at_ns(device, stream, &moment_ns) != DITORCH_OK) return DITORCH_INVALID;
  hold_host_until(*find_device(device), moment_ns);
  return DITORCH_OK;
}

ditorch_status stream_ready_at_ns(int32_t device, ditorch_stream* stream, int64_t* ready_at_ns) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  *ready_at_ns = found->stream(stream).ready_at_ns;
  return DITORCH_OK;
}

ditorch_status stream_wait_until_ns(int32_t device, ditorch_stream* stream, int64_t until_ns) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (until_ns - now_ns() > kLongestWait_ns) {
    return fail(DITORCH_INVALID, "stream_wait_until_ns: %lld is more than an hour from now (%lld)",
                static_cast<long long>(until_ns), static_cast<long long>(now_ns()));
  }
  const std::lock_guard lock(found->mutex);
  found->wait_until(found->stream(stream), until_ns);
  // Whoever calls this has waited on the host for data, so the host is not late before now.
  found->release_host(now_ns());
  return DITORCH_OK;
}

}  // namespace emuchip
