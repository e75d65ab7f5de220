// Memory that all ranks share, whether they are threads or processes: what each of them did, where
// they meet, and whether one of them found something wrong.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <stdexcept>

namespace dicomm::oracle {

constexpr int kMaxRanks = 16;
constexpr std::uint32_t kMaxRecords = 8192;

struct SendRecord {
  std::int8_t communicator, to, tag;
  bool cancelled;  // destroyed unfinished: it may have arrived, or not
  std::uint32_t sequence;
};

enum class Received : std::uint8_t {
  pending,
  delivered,
  truncated,   // the message was longer than the buffer
  taken_back,  // by the sender, who destroyed its request
  dropped,     // destroyed unfinished: it may have swallowed a message, or not
  surplus,     // destroyed when nothing was left to come
};

// In the order of posting.
struct ReceiveRecord {
  std::int8_t communicator, tag;
  std::int8_t posted_for;  // a rank, or any_source
  std::int8_t from;        // once known
  Received outcome;
  bool has_sequence;  // the message was long enough to carry it
  std::uint8_t short_contents[8];
  std::uint64_t sequence;
  std::uint64_t bytes;  // delivered; or, where truncated, of the message
};

struct RankLog {
  std::atomic<std::uint64_t> operations;
  std::uint32_t sends, receives;
  SendRecord send[kMaxRecords];
  ReceiveRecord receive[kMaxRecords];
};

struct Arena {
  std::atomic<int> arrived, round;
  std::atomic<bool> failed, stop;
  RankLog ranks[kMaxRanks];

  static Arena& create() {
    void* memory =
        ::mmap(nullptr, sizeof(Arena), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return *static_cast<Arena*>(memory);  // zeroes are a good beginning
  }

  // All ranks meet; throws where one failed, or does not come.
  void meet(int rank_count) {
    const int here = round;
    if (++arrived == rank_count) {
      arrived = 0;
      ++round;
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(200);
    while (round == here) {
      if (failed) throw std::runtime_error("another rank failed");
      if (std::chrono::steady_clock::now() > deadline)
        throw std::runtime_error("another rank did not come to the end of the epoch");
      ::usleep(50);
    }
  }
};

}  // namespace dicomm::oracle
