// Working memory of collectives, kept between calls: fresh pages cost more than the messages.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/huge_pages.h"

namespace dicomm {

class Scratch {
 public:
  explicit Scratch(std::size_t bytes) {
    auto& kept = kept_blocks();
    if (!kept.empty()) {
      block_ = std::move(kept.back());
      kept.pop_back();
    }
    if (block_.bytes >= bytes) return;
    block_ = {std::unique_ptr<std::byte[]>(new std::byte[bytes]), bytes};
    prefer_huge_pages(block_.data.get(), bytes);
  }
  ~Scratch() { kept_blocks().push_back(std::move(block_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* data() const { return block_.data.get(); }

 private:
  struct Memory {
    std::unique_ptr<std::byte[]> data;
    std::size_t bytes = 0;
  };
  static std::vector<Memory>& kept_blocks() {
    static thread_local std::vector<Memory> kept;
    return kept;
  }
  Memory block_;
};

}  // namespace dicomm
