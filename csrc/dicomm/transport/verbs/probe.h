// Whether a NIC can really reach memory that it registered.
//
// Registering a chip's memory may succeed where the way to it does not exist: no peer-to-peer
// between the two PCI Express slots, say. Then reads fail, or return what was never there.
#pragma once

#include "transport/verbs/device.h"

namespace dicomm::verbs {

// Has the device read both ends of the region over a queue pair that leads back to itself, and
// compares with what the host sees there, where the host can. The region itself is only read: it
// may be in use. Where the device cannot be asked, as it does not loop back, it is taken to reach
// all but a chip's own memory: what it wrote there could not be flushed.
bool reaches(const Rails& rails, std::size_t device, const Region& region,
             const Registered& registered);

}  // namespace dicomm::verbs
