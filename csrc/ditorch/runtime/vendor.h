// The vendor's library behind this process's device: found, checked, and kept for good.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "abi/operators.h"
#include "abi/runtime.h"

namespace ditorch {

struct Vendor {
  std::string path;
  const ditorch_runtime* runtime = nullptr;
  const ditorch_operators* operators = nullptr;  // null: the vendor has no kernels
  std::vector<ditorch_device_properties> devices;
};

// Opens the library at `path` and checks that it speaks both ABIs. Throws one sentence if not.
void load_vendor(const std::string& path);

// The loaded vendor; only called after load_vendor succeeded.
const Vendor& vendor();

// Whether the host may read and write memory of the chip through the chip's own pointers.
bool host_reaches(c10::DeviceIndex device);

// Throws the vendor's own sentence (torch.OutOfMemoryError when memory is short).
void check(ditorch_status status, const char* action);

// "chip B of vendor B (emuchip:0, rank 3)", for messages.
std::string describe_chip(c10::DeviceIndex device);

inline constexpr c10::DeviceType kChip = c10::DeviceType::PrivateUse1;

inline c10::Device chip_device(c10::DeviceIndex index) { return c10::Device(kChip, index); }

}  // namespace ditorch
