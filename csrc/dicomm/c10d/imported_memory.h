// Other processes' chip memory that this process has imported, kept for the next message from it.
#pragma once

#include "chip_memory.h"

namespace dicomm {

// The piece that a handle means. Throws where the chip does not reach it.
const void* imported_memory(const ChipMemory& memory, c10::DeviceIndex device,
                            const MemoryHandle& handle);

}  // namespace dicomm
