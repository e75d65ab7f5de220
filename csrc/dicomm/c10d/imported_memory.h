// Other processes' chip memory that this process has imported, kept for the next message from it.
#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <functional>

#include "chip_memory.h"
#include "streams.h"

namespace dicomm {

// Finds the piece that a handle means and has it used: `use` gives the chip work that reads it, and
// returns the mark behind that, which is this function's result. Throws where the chip does not
// reach the piece, and what `use` throws.
StreamMark use_imported_memory(const ChipMemory& memory, c10::DeviceIndex device,
                               const MemoryHandle& handle,
                               const std::function<StreamMark(const void*)>& use);

// Whoever cannot copy from chip to chip is slower, and not wrong.
void warn_of_the_longer_way(const c10::Error& error);

// An allocation that its owner freed stays in the chip's memory while it is imported somewhere, and
// nobody tells. So not many are kept: as many as kMostImports of a process, each of them a segment
// of its allocator. Whenever a chip has received a message or reduced something, those are released
// that nothing has used for so long. Not under a communicator's mutex, as a vendor may wait here
// for its chip.
constexpr std::size_t kMostImports = 16;
constexpr std::chrono::seconds kImportsKept{60};
void release_unused_imports(std::chrono::seconds kept = kImportsKept);

}  // namespace dicomm
