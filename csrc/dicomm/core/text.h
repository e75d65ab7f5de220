// Pieces of error sentences.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>

namespace dicomm {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

inline std::string seconds(std::chrono::nanoseconds duration) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.3f s", duration.count() * 1e-9);
  return buffer;
}

// "10.0.0.3:4242", "[fd00::3]:4242"
inline std::string endpoint(const std::string& address, const std::string& port) {
  const bool ip_6 = address.find(':') != address.npos;
  return (ip_6 ? '[' + address + ']' : address) + ':' + port;
}

// "Connection refused", for an errno.
inline std::string system_error(int error) { return std::strerror(error); }

}  // namespace dicomm
