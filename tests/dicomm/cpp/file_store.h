// Where ranks that are processes find each other: a folder, a file a key.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "support.h"

namespace dicomm::testing {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = std::filesystem::temp_directory_path() / "dicomm-test-XXXXXX";
    if (!::mkdtemp(name.data())) throw Error("cannot make a temporary folder");
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    const auto unfinished = folder_ / (file_name(key) + ".part");
    std::ofstream(unfinished, std::ios::binary) << value;
    std::filesystem::rename(unfinished, folder_ / file_name(key));
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      if (std::ifstream file(folder_ / file_name(key), std::ios::binary); file)
        return {std::istreambuf_iterator<char>(file), {}};
      if (std::chrono::steady_clock::now() >= deadline) throw TimeoutError("no key " + key);
      ::usleep(500);
    }
  }

  void clear() {
    for (const auto& file : std::filesystem::directory_iterator(folder_))
      std::filesystem::remove(file);
  }

 private:
  static std::string file_name(std::string key) {
    for (char& c : key)
      if (c == '/') c = '_';
    return key;
  }

  std::filesystem::path folder_;
};

}  // namespace dicomm::testing
