// Makes the string "device" mean this process's device wherever torch reads a device string.
#pragma once

#include <string>

namespace ditorch {

// From now on "device" reads as `device_type` ("emuchip", "cuda", "cpu") and "device:N" as its
// N-th, with all that torch makes of an index or of its absence. Throws one sentence if torch could
// not be taught. Call it once.
void unify_device_name(const std::string& device_type);

// From now on "cuda" reads as "device" does. Only for devices that are not called cuda.
void unify_cuda_name();

}  // namespace ditorch
