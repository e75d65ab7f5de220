// A chip file: one chip described in a small subset of TOML (tables, key = value, comments).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "runtime.h"

namespace emuchip {

enum class Accumulate { kFloat32, kFloat64, kBfloat16 };
enum class Order { kSequential, kBlocked, kPairwise };

// How the chip's arithmetic differs from another vendor's in the last bits.
struct Numerics {
  bool neutral = false;  // no kernels of its own: the host's are used, bit for bit
  Accumulate accumulate = Accumulate::kFloat32;
  Order order = Order::kSequential;
  int64_t split_k = 1;
  bool flush_to_zero = false;
  bool fast_exp = false;
};

struct ChipFile {
  std::string vendor;
  std::string chip_type;
  double launch_s = 0;
  double efficiency = 1;  // share of the peak that products of matrices reach
  double float32_flops = 0;
  double float64_flops = 0;
  double float16_flops = 0;
  double bfloat16_flops = 0;
  double other_flops = 0;
  int64_t capacity_bytes = 0;
  double bandwidth_bytes_per_s = 0;
  double host_bytes_per_s = 0;
  Numerics numerics;

  double peak_flops(ditorch_dtype dtype) const;
};

// One sentence naming the file, the key and what was expected.
struct ChipFileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads and checks the file. Throws ChipFileError.
ChipFile read_chip_file(const std::string& path);

}  // namespace emuchip
