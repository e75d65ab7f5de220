// The part of TOML that chip files use: tables, key = string | integer | float | boolean, comments.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>

namespace emuchip {

using TomlValue = std::variant<bool, int64_t, double, std::string>;

// Keys carry their table: "vendor", "compute.launch_s".
using TomlTable = std::map<std::string, TomlValue>;

struct TomlError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws TomlError; its sentence names the line.
TomlTable parse_toml(const std::string& text);

}  // namespace emuchip
