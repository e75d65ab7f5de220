// What a run does, as far as the seed alone decides it: both sides of a message compute its length
// and contents from its place in its channel, so that a receiver knows what must arrive.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/communicator.h"

namespace dicomm::oracle {

struct Settings {
  std::uint64_t seed = 1;
  std::uint64_t operations = 30'000;  // at least; whole epochs are run
  int ranks = 3;
  std::string transport = kAnyTransport;
  bool processes = false;  // ranks are processes, not threads
};

// An epoch: communicators are made, used at random, drained and closed, and what happened on them
// is held against the model. In some a rank aborts, or leaves without draining.
enum class EpochKind { orderly, abort, leave };

constexpr int kTags = 5;
constexpr int kCommunicators = 2;
constexpr int kStepsAnEpoch = 400;        // a rank's
constexpr int kStepsACollective = 80;     // a rank's, between two
constexpr std::size_t kEndBytes = 12345;  // the last message of a channel; no other is as long
constexpr std::uint64_t kEndSequence = ~0ULL;
constexpr std::size_t kMaxBytes = (3 << 20) + 100;

// Messages with one tag from one rank to another: they arrive in order.
struct Channel {
  int communicator, from, to, tag;
};

struct Plan {
  const Settings& settings;
  std::uint64_t epoch;

  EpochKind kind() const;
  int failing_rank() const;
  int failing_step() const;
  std::uint64_t tag_value(int tag) const;
  std::size_t message_bytes(const Channel& channel, std::uint64_t sequence) const;
  std::uint64_t message_key(const Channel& channel, std::uint64_t sequence) const;
  std::uint64_t rank_seed(int rank) const;
  std::uint64_t collective_seed(int index) const;
};

// From 0 bytes to some MiB, mostly short, often around the lengths at which the way to send
// changes.
std::size_t bytes_from(std::uint64_t random);

}  // namespace dicomm::oracle
