// 16-bit floats as bit patterns, converted without branches so that compilers vectorise.
#pragma once

#include <bit>
#include <cstdint>

namespace dicomm {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest even
  return {static_cast<std::uint16_t>(value != value ? 0x7fc0u : rounded)};
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  // Scaling by 2^112 moves the exponent from binary16's bias to binary32's, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const std::uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN keep their payload
  const auto finite = std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

inline Float16 to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 aligns a subnormal's last bit with the float's, so the addition itself rounds.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to 65536 or more: infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
  return {static_cast<std::uint16_t>(sign | half)};
}

}  // namespace dicomm
