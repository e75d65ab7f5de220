// A queue pair that leads a NIC back to itself, for reads of what it registered.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "transport/verbs/queue_pair.h"

namespace dicomm::verbs {

class LoopBack {
 public:
  static constexpr std::size_t kMostBytes = 256;
  using Piece = std::array<std::byte, kMostBytes>;

  LoopBack(const Rail& rail, const Settings& settings);  // throws Error
  ~LoopBack();

  // Reads what the device finds there, at most kMostBytes, and waits for it. "", or why it cannot;
  // nothing can be read any more then. Throws RailError.
  std::string read(std::uint64_t address, std::uint32_t bytes, std::uint32_t rkey, Piece& found);
  // Whether a read of the host's own memory works. Throws RailError.
  bool works();

 private:
  static std::uint64_t address_of(const Piece& piece) {
    return reinterpret_cast<std::uint64_t>(piece.data());
  }

  Device& device_;
  QueuePair pair_;
  alignas(64) Piece landing_{};
  std::optional<Registered> landing_key_;
};

}  // namespace dicomm::verbs
