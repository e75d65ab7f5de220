// Which receive gets which message: by communicator, tag and peer, in the order of posting and of
// arrival.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <unordered_set>
#include <vector>

#include "core/request.h"
#include "core/stream.h"

namespace dicomm {

// A message that came before its receive: all of it, or the offer of it.
struct Arrival {
  int peer = 0;  // world rank
  std::uint32_t context = 0;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint32_t id = 0;
  std::int64_t delivered_at_ns = 0;
  bool offered = false;
  std::uint64_t address = 0;             // offered
  MemoryKeys keys{};                     // offered
  std::unique_ptr<MemoryHandle> chip;    // offered from a chip's memory
  std::unique_ptr<std::byte[]> payload;  // not offered
  bool complete = false;
  RequestState* receiver = nullptr;  // posted while the payload was still coming in
};

class Matcher {
 public:
  // Takes out the first posted receive for a message; null if none.
  RequestState* match(int peer, std::uint64_t tag, std::uint32_t context = 0);
  // Takes out the first arrival for a receive; null if none.
  std::shared_ptr<Arrival> match(const RequestState& receive);

  void post(RequestState& receive) {
    bucket(receive.tag, receive.context).posted.push_back(receive);
  }
  void keep(std::shared_ptr<Arrival> arrival);

  bool remove(RequestState& receive);
  // Forgets an offer that its sender took back, or what a peer that is gone cannot complete.
  bool remove_offer(int peer, std::uint32_t id);
  void remove_incomplete(int peer);
  // Forgets all receives of a communicator that is over, and returns the messages that nobody wants
  // now. Those that are still to come are not to be kept.
  std::vector<std::shared_ptr<Arrival>> end(std::uint32_t context);
  bool has_ended(std::uint32_t context) const { return ended_.contains(context); }

 private:
  // Tags and communicators share buckets; each keeps its order. Neither posting nor matching
  // allocates.
  struct Bucket {
    RequestList<&RequestState::in_matcher> posted;
    std::list<std::shared_ptr<Arrival>> arrived;
  };
  static constexpr int kBucketBits = 8;

  Bucket& bucket(std::uint64_t tag, std::uint32_t context) {
    return buckets_[(tag + context) * 0x9e3779b97f4a7c15 >> (64 - kBucketBits)];
  }
  template <class F>
  bool remove_arrivals(F&& unwanted);

  std::array<Bucket, 1 << kBucketBits> buckets_;
  std::unordered_set<std::uint32_t> ended_;
};

}  // namespace dicomm
