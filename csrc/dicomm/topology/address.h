#pragma once

#include <string>

#include "topology/topology.h"

namespace dicomm {

// A PCI address as sysfs writes it: "1A:00.0" is "0000:1a:00.0". Throws Error if it is none, or if
// no such device is in the topology.
std::string checked_address(const Topology& topology, const std::string& address);

}  // namespace dicomm
