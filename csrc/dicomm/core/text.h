// Pieces of error sentences.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>

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

// At most so many bytes of a UTF-8 text; no character is cut in two.
inline std::string_view shortened(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (text[bytes] & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

// The length of the UTF-8 character that a text begins with; 0: it begins with none.
inline std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const int first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const bool overlong =
      first < 0xc2 || (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool surrogate = first == 0xed && second > 0x9f;
  const bool too_large = first > 0xf4 || (first == 0xf4 && second > 0x8f);
  if (overlong || surrogate || too_large) return 0;
  const std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  return length;
}

// What a peer wrote, as UTF-8: Python refuses errors with any other bytes, and a peer may send any.
inline std::string as_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    result += bytes > 0 ? text.substr(0, bytes) : "\ufffd";
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return result;
}

// "Connection refused", for an errno.
inline std::string system_error(int error) { return std::strerror(error); }

}  // namespace dicomm
