// The clock of a chip that knows in advance when its work will be done, as two C functions that
// a transport may call from any thread. They act on the calling thread's current stream.
#pragma once

#include <cstdint>

extern "C" {

// When the work submitted so far will be done, in CLOCK_MONOTONIC nanoseconds.
int64_t ditorch_ready_at_ns(int32_t device_index);

// Later work starts no earlier than `moment_ns`; the host is not held.
void ditorch_wait_until_ns(int32_t device_index, int64_t moment_ns);
}
