// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proof that a connection knows the job's secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dicomm {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view message);
Digest hmac_sha256(std::string_view key, std::string_view message);

// Takes the same time wherever the digests differ.
bool equal(const Digest& a, const Digest& b);

}  // namespace dicomm
