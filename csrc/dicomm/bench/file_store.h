// A Store of one file per key in a folder, as dicomm.FileStore in Python.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "core/communicator.h"

namespace dicomm::bench {

class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }

  void set(const std::string& key, const std::string& value) override {
    const auto whole = file(key);
    const auto part = folder_ / (".new-" + whole.filename().string());
    std::ofstream(part, std::ios::binary) << value;
    std::filesystem::rename(part, whole);  // a reader sees all of it or nothing
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      if (std::ifstream stream(file(key), std::ios::binary); stream)
        return {std::istreambuf_iterator<char>(stream), {}};
      if (std::chrono::steady_clock::now() >= deadline)
        throw TimeoutError("no key '" + key + "' in " + folder_.string());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

 private:
  std::filesystem::path file(const std::string& key) const {
    std::string name;
    for (const char c : key) name += c == '/' ? std::string("%2F") : std::string(1, c);
    return folder_ / name;
  }

  std::filesystem::path folder_;
};

}  // namespace dicomm::bench
