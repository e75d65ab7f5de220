// Who wants to know which of the chip's memory the allocator holds: transports, which register it
// with network cards and must forget it before the chip has it back.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ditorch {

// C functions, called under the allocator's lock: they must not allocate on the chip.
using MemoryFunction = void (*)(std::int32_t device, std::uint64_t address, std::uint64_t bytes);

// From now on calls `taken` for each block the allocator takes from the chip, those it holds
// already included, and `returned` before it gives one back.
void watch_memory(MemoryFunction taken, MemoryFunction returned);

// For the allocator.
void memory_taken(std::int32_t device, void* pointer, std::size_t bytes);
void memory_returned(void* pointer);

}  // namespace ditorch
