// The sentence behind a status: each thread remembers its last failure.
#pragma once

#include "runtime.h"

namespace emuchip {

// Keeps the sentence (printf style) for last_error and hands `status` back.
[[gnu::format(printf, 2, 3)]] ditorch_status fail(ditorch_status status, const char* format, ...);

const char* last_error();

}  // namespace emuchip
