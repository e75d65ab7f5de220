// A message's bytes in a chip's memory, which the host need not reach: where the peer is a process
// of this host, its chip may copy them itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace dicomm {

// What another process needs to reach a piece of a chip's memory. It travels in an offer.
struct MemoryHandle {
  std::array<std::uint8_t, 64> allocation{};  // the vendor's own words
  std::uint64_t offset_bytes = 0;             // where the piece begins in the allocation
  std::int64_t process = 0;                   // whose memory it is
};

// What a chip was told to do: a copy, say. Called as ChipBuffer is.
class ChipWork {
 public:
  virtual ~ChipWork() = default;
  virtual bool done() = 0;  // never waits; throws where the chip failed
};

// Called under the communicator's mutex, by any thread. What is thrown where a receive takes a
// message that is there already fails that receive; elsewhere it ends the connection.
class ChipBuffer {
 public:
  virtual ~ChipBuffer() = default;

  // A sender's: how the peer reaches the bytes.
  virtual const MemoryHandle& handle() const = 0;
  // A receiver's: has the chip copy the peer's bytes to here, in the order of its streams. Null:
  // it does not reach them.
  virtual std::shared_ptr<ChipWork> pull(const MemoryHandle& from, std::size_t bytes) = 0;
  // Host memory in place of the buffer, for a peer that cannot pull: a sender's has the bytes once
  // the copy is done, a receiver's has room for them.
  struct OnHost {
    std::byte* data;
    std::shared_ptr<ChipWork> copy;  // null: there is nothing to wait for
  };
  virtual OnHost on_host() = 0;
};

}  // namespace dicomm
