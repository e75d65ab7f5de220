#include "chip.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "error.h"

namespace emuchip {
namespace {

int32_t devices_wanted() {
  const char* text = std::getenv("EMUCHIP_DEVICES");
  if (!text) return 1;
  int32_t count = 0;
  const char* last = text + std::strlen(text);
  const auto [end, error] = std::from_chars(text, last, count);
  if (error != std::errc() || end != last || count < 1 || count > 64) {
    throw ChipFileError("EMUCHIP_DEVICES: expected an integer from 1 to 64, got '" +
                        std::string(text) + "'");
  }
  return count;
}

const Chip* load_chip() {
  auto* chip = new Chip;
  try {
    const char* path = std::getenv("EMUCHIP_CHIP");
    if (!path || !*path) {
      throw ChipFileError("EMUCHIP_CHIP is not set: expected the path of a chip file");
    }
    const int32_t count = devices_wanted();
    chip->file = read_chip_file(path);
    for (int32_t i = 0; i < count; ++i) {
      chip->devices.push_back(std::make_unique<Device>(i, chip->file));
    }
  } catch (const ChipFileError& error) {
    chip->error = error.what();
  }
  return chip;
}

}  // namespace

const Chip& process_chip() {
  // Never freed: tensors are still released while the process exits.
  static const Chip* const chip = load_chip();
  return *chip;
}

int32_t count_devices() {
  const Chip& chip = process_chip();
  if (!chip.error.empty()) {
    fail(DITORCH_ERROR, "%s", chip.error.c_str());
    return -1;
  }
  return static_cast<int32_t>(chip.devices.size());
}

Device* find_device(int32_t index) {
  const int32_t count = count_devices();
  if (count < 0) return nullptr;
  if (index < 0 || index >= count) {
    fail(DITORCH_INVALID, "device %d does not exist: this process has devices 0 to %d", index,
         count - 1);
    return nullptr;
  }
  return process_chip().devices[index].get();
}

}  // namespace emuchip
