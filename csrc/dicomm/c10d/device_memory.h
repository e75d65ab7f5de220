// The chip memory that every communicator of this process may register with its network cards.
#pragma once

#include <cstdint>
#include <memory>

#include "core/communicator.h"

namespace dicomm {

// Declares what is known now to a communicator, and what becomes known for as long as it lives.
void share_device_memory(const std::shared_ptr<Communicator>& communicator);

}  // namespace dicomm

// For a chip's allocator, which calls them through their addresses; from any thread.
extern "C" {
void dicomm_memory_taken(std::int32_t device, std::uint64_t address, std::uint64_t bytes);
void dicomm_memory_returned(std::int32_t device, std::uint64_t address, std::uint64_t bytes);
}
