// Waits for autograd's threads, before Python ends.
#pragma once

#include <c10/core/Device.h>

namespace ditorch {

// Returns once autograd's thread for `device` has let go of every graph that backward ran before
// now, or after `deadline_s`. Call it without Python's lock, which that thread may need.
void let_autograd_rest(c10::Device device, double deadline_s);

}  // namespace ditorch
