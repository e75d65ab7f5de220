// The memory of NVIDIA's GPUs, which their driver lets the processes of a host share.
#pragma once

#include <memory>

#include "chip_memory.h"

namespace dicomm {

// Null: the device type is not that of NVIDIA's GPUs, or their driver is not installed.
std::unique_ptr<ChipMemory> cuda_memory(c10::DeviceType type);

}  // namespace dicomm
