// The text of the kernel that an elementwise program becomes.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "operators.h"

namespace opencl {

constexpr int32_t kMostDimensions = 8;
constexpr int32_t kMostConstants = 16;

// What a kernel's text depends on.
struct MapShape {
  ditorch_dtype compute;
  int32_t dimensions;
  std::vector<ditorch_dtype> dtypes;  // one for each operand
  std::vector<int64_t> last_strides;
  const ditorch_instruction* instructions;
  int32_t count;
};

// Whether the device has a form of every step and dtype, and room for all dimensions and constants.
bool has_map(const Device& device, const MapShape& shape);

// What tells the texts of two shapes apart.
std::string map_key(const MapShape& shape);

// Items walk over the last dimension in runs, and over the others one place each. The kernel takes
// the operands, `struct walk` and `struct constants`.
std::string map_text(const Device& device, const MapShape& shape, int64_t run);

}  // namespace opencl
