// Emulated time, on the host's CLOCK_MONOTONIC.
#pragma once

#include <cstdint>

namespace emuchip {

int64_t now_ns();

// Holds the calling thread until the moment has come.
void sleep_until_ns(int64_t moment_ns);

}  // namespace emuchip
