// Reading a sysfs tree. What is missing or unreadable (containers hide files) is nullopt or empty;
// what is there and makes no sense is an Error that names the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace dicomm::sysfs {

using Path = std::filesystem::path;

// The first line, without blanks at its ends.
std::optional<std::string> read_line(const Path& file);
// A whole number in decimal, or in hexadecimal after 0x.
std::optional<std::int64_t> read_integer(const Path& file);
// A number and the unit behind it: "100 Gb/sec (4X EDR)" is 100 with unit "Gb/sec".
std::optional<double> read_quantity(const Path& file, const std::string& unit);

// Names in a folder, in order.
std::vector<std::string> entries(const Path& folder);
// Where a link leads in the end, as the names on the way from the file system's root.
std::vector<std::string> real_path(const Path& link);

// "CPU-wide lists": "0-1,4" is 0 1 4.
std::vector<int> read_list(const Path& file);

std::optional<std::int64_t> parse_integer(const std::string& word);

}  // namespace dicomm::sysfs
