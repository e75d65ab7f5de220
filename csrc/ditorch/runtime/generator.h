// The device's random generator: the host's Mersenne twister under the device's name, so that
// one seed gives the same numbers on every emulated chip as on the CPU.
#pragma once

#include <ATen/core/Generator.h>

namespace ditorch {

const at::Generator& default_generator(c10::DeviceIndex device);  // -1: the current device
at::Generator new_generator(c10::DeviceIndex device);

// The CPU generator inside a device generator; throws if `generator` is another device's.
at::Generator host_generator(const at::Generator& generator);

}  // namespace ditorch
