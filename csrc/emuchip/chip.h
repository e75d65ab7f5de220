// The process's chip: the file named by EMUCHIP_CHIP, as EMUCHIP_DEVICES (default 1) devices.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chip_file.h"
#include "device.h"

namespace emuchip {

struct Chip {
  ChipFile file;
  std::vector<std::unique_ptr<Device>> devices;
  std::string error;  // why there is no chip; empty if there is one
};

// Read at the first call, then the same for the life of the process.
const Chip& process_chip();

}  // namespace emuchip
