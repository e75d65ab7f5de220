#include "topology/sysfs.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "core/communicator.h"
#include "core/text.h"

namespace dicomm::sysfs {

namespace {

Error nonsense(const Path& file, const std::string& value, const std::string& expected) {
  return Error(text(file.string(), ": '", value, "' is not ", expected));
}

}  // namespace

std::optional<std::string> read_line(const Path& file) {
  std::ifstream stream(file);
  std::string line;
  if (!std::getline(stream, line)) return std::nullopt;
  const auto first = line.find_first_not_of(" \t\r");
  if (first == std::string::npos) return std::nullopt;
  return line.substr(first, line.find_last_not_of(" \t\r") - first + 1);
}

std::optional<std::int64_t> parse_integer(const std::string& word) {
  const bool hexadecimal = word.starts_with("0x");
  const char* first = word.data() + (hexadecimal ? 2 : 0);
  const char* last = word.data() + word.size();
  std::int64_t value = 0;
  const auto [end, failure] = std::from_chars(first, last, value, hexadecimal ? 16 : 10);
  if (failure != std::errc() || end != last) return std::nullopt;
  return value;
}

std::optional<std::int64_t> read_integer(const Path& file) {
  const auto line = read_line(file);
  if (!line) return std::nullopt;
  const auto value = parse_integer(*line);
  if (!value) throw nonsense(file, *line, "a whole number");
  return value;
}

std::optional<double> read_quantity(const Path& file, const std::string& unit) {
  const auto line = read_line(file);
  if (!line || line->starts_with("Unknown")) return std::nullopt;
  std::istringstream words(*line);
  double value = 0;
  std::string its_unit;
  if (!(words >> value >> its_unit) || its_unit != unit || !(value >= 0))
    throw nonsense(file, *line, text("a number of ", unit));
  return value;
}

std::vector<std::string> entries(const Path& folder) {
  std::vector<std::string> names;
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> real_path(const Path& link) {
  std::error_code broken;
  const Path real = std::filesystem::canonical(link, broken);
  std::vector<std::string> names;
  for (const Path& name : real) names.push_back(name);
  return names;
}

std::vector<int> read_list(const Path& file) {
  const auto line = read_line(file);
  std::vector<int> numbers;
  if (!line) return numbers;
  std::istringstream ranges(*line);
  for (std::string range; std::getline(ranges, range, ',');) {
    const auto dash = range.find('-');
    const auto first = parse_integer(range.substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_integer(range.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last - *first > 65536)
      throw nonsense(file, *line, "a list of numbers");
    for (auto number = *first; number <= *last; ++number) numbers.push_back(number);
  }
  return numbers;
}

}  // namespace dicomm::sysfs
