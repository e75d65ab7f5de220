#include "cache.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace opencl {
namespace {

namespace fs = std::filesystem;

// Empty where there is no place for it.
fs::path folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return fs::path(value && *value ? value : "");
  };
  fs::path base = variable("XDG_CACHE_HOME");
  if (base.empty() && !variable("HOME").empty()) base = variable("HOME") / ".cache";
  return base.is_absolute() ? base / "hyperhetero" / "opencl" : fs::path();
}

}  // namespace

std::string digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

// A driver may die of a damaged binary, so that a file begins with the digest of the rest.
std::optional<std::string> load_cached(const std::string& name) {
  if (folder().empty()) return std::nullopt;
  std::ifstream file(folder() / name, std::ios::binary);
  std::string all{std::istreambuf_iterator<char>(file), {}};
  constexpr size_t kDigits = 16;
  if (all.size() < kDigits) return std::nullopt;
  std::string content = all.substr(kDigits);
  if (all.compare(0, kDigits, digest(content)) != 0) return std::nullopt;
  return content;
}

void save_cached(const std::string& name, const std::string& content) {
  if (folder().empty()) return;
  std::error_code error;
  fs::create_directories(folder(), error);
  std::string fresh = (folder() / (name + ".XXXXXX")).string();
  const int descriptor = mkstemp(fresh.data());
  if (descriptor < 0) return;
  close(descriptor);
  std::ofstream file(fresh, std::ios::binary);
  file << digest(content) << content;
  file.close();
  if (file) fs::rename(fresh, folder() / name, error);
  if (!file || error) fs::remove(fresh, error);
}

}  // namespace opencl
