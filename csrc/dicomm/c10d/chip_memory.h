// What a vendor's library or driver does so that others than the chip reach its memory: the chips
// of other processes of the host, and network cards.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "core/chip_buffer.h"
#include "core/communicator.h"

namespace dicomm {

// From any thread. Throw one sentence.
class ChipMemory {
 public:
  virtual ~ChipMemory() = default;
  virtual MemoryHandle export_from(c10::DeviceIndex device, const void* address) const = 0;
  // Where this process finds the handle's allocation, until it is released.
  virtual void* import(c10::DeviceIndex device, const MemoryHandle& handle) const = 0;
  virtual void release(c10::DeviceIndex device, void* imported) const = 0;
  // On the current stream, of which it is in order.
  virtual void copy(c10::DeviceIndex device, void* to, const void* from,
                    std::size_t bytes) const = 0;
  // A piece of the chip's memory for a network card; nothing where the chip has no such thing.
  virtual std::optional<Dmabuf> export_dmabuf(c10::DeviceIndex device, const void* address,
                                              std::size_t bytes) const = 0;
};

// Lets the chips of this device type share memory, and returns whether they can: as their vendor's
// library knows to, which implements ditorch's runtime ABI, or, where none is named, as their
// driver does, which is known for NVIDIA's GPUs. Throws where it is no such library.
bool share_chip_memory(c10::DeviceType type, const std::string& library);
// The same of the one vendor whose chip this process is; nothing, too, where it fails.
std::optional<Dmabuf> export_chip_dmabuf(c10::DeviceIndex device, std::uint64_t address,
                                         std::uint64_t bytes) noexcept;
// Null: the chips of this device type share none.
const ChipMemory* chip_memory(c10::DeviceType type);

// Equal for two processes that reach each other's chip memory; empty: no other does. A word.
std::string chip_memory_domain();

}  // namespace dicomm
