#include "toml.h"

#include <charconv>
#include <set>
#include <sstream>

namespace emuchip {
namespace {

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::string without_comment(const std::string& line) {
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') quoted = !quoted;
    if (line[i] == '#' && !quoted) return line.substr(0, i);
  }
  return line;
}

bool is_bare_key(const std::string& key) {
  return !key.empty() && key.find_first_not_of(
                             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                             "0123456789_-") == std::string::npos;
}

// TOML lets digits be grouped: 103_079_215_104.
bool drop_digit_groups(const std::string& text, std::string* digits) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      *digits += text[i];
    } else if (i == 0 || i + 1 == text.size() || !isdigit(text[i - 1]) || !isdigit(text[i + 1])) {
      return false;
    }
  }
  return true;
}

template <class Number>
bool parse_number(const std::string& digits, Number* number) {
  const char* first = digits.data() + (digits.starts_with('+') ? 1 : 0);
  const char* last = digits.data() + digits.size();
  const auto [end, error] = std::from_chars(first, last, *number);
  return error == std::errc() && end == last;
}

bool parse_value(const std::string& text, TomlValue* value) {
  if (text == "true" || text == "false") {
    *value = text == "true";
    return true;
  }
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    const std::string inner = text.substr(1, text.size() - 2);
    *value = inner;
    return inner.find_first_of("\"\\") == std::string::npos;
  }
  std::string digits;
  int64_t integer = 0;
  double real = 0;
  if (!drop_digit_groups(text, &digits)) return false;
  if (parse_number(digits, &integer)) {
    *value = integer;
  } else if (parse_number(digits, &real)) {
    *value = real;
  } else {
    return false;
  }
  return true;
}

}  // namespace

TomlTable parse_toml(const std::string& text) {
  TomlTable values;
  std::set<std::string> tables;
  std::istringstream lines(text);
  std::string line, prefix;
  for (int number = 1; std::getline(lines, line); ++number) {
    const std::string where = "line " + std::to_string(number) + ": ";
    const std::string content = trimmed(without_comment(line));
    if (content.empty()) continue;
    if (content.front() == '[') {
      const std::string name = trimmed(content.substr(1, content.size() - 2));
      if (content.back() != ']' || !is_bare_key(name)) {
        throw TomlError(where + "expected a table such as [compute], got '" + content + "'");
      }
      if (!tables.insert(name).second) throw TomlError(where + "table [" + name + "] is repeated");
      prefix = name + ".";
      continue;
    }
    const size_t equals = content.find('=');
    const std::string key = trimmed(content.substr(0, equals));
    if (equals == std::string::npos || !is_bare_key(key)) {
      throw TomlError(where + "expected key = value, got '" + content + "'");
    }
    TomlValue value;
    const std::string written = trimmed(content.substr(equals + 1));
    if (!parse_value(written, &value)) {
      throw TomlError(where + "the value of " + prefix + key +
                      " must be a number, a \"string\", true or false, got '" + written + "'");
    }
    if (!values.emplace(prefix + key, value).second) {
      throw TomlError(where + prefix + key + " is repeated");
    }
  }
  return values;
}

}  // namespace emuchip
