// One rank in one epoch.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collective/group.h"
#include "oracle/arena.h"
#include "oracle/plan.h"

namespace dicomm::oracle {

// What must not happen. `what` says on which channel.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Rank {
 public:
  Rank(const Plan& plan, Arena& arena, std::shared_ptr<Store> store, int rank);
  void run();

 private:
  // A buffer between guard bytes that nobody may write, at any alignment.
  struct Buffer {
    Buffer(std::size_t bytes, unsigned misalignment);
    void expect_intact(const char* what) const;

    std::unique_ptr<std::byte[]> memory;
    std::byte* data;
    std::size_t bytes;
  };
  struct Send {
    Buffer buffer;
    Channel channel;
    std::uint64_t sequence;
    std::uint32_t record;
    std::shared_ptr<Request> request;  // destroyed before its buffer
  };
  struct Receive {
    Buffer buffer;
    std::uint32_t record;
    std::shared_ptr<Request> request;
  };

  // The random part.
  void step();
  void send_some();
  void post_some();
  void look_at_one(bool wait);
  void drop_one();
  void collective();
  void fail_on_purpose();

  // The orderly end.
  void drain();
  bool post_for_missing_ends();
  void finish_sends();
  void drop_surplus();

  void start_send(const Channel& channel, std::uint64_t sequence);
  void start_receive(int communicator, int from, int tag, std::size_t capacity);
  std::size_t likely_bytes(int communicator, int from, int tag);
  // Whether the request is over; removes it from the pending ones then.
  bool settle_send(std::size_t index, bool wait);
  bool settle_receive(std::size_t index, bool wait);
  void delivered(Receive& receive, std::size_t bytes);
  void refused(Receive& receive, const std::string& text);
  void note_end(const ReceiveRecord& record);
  // An error that some epochs bring about on purpose; else a violation.
  void expect_failure(int communicator, const std::string& text);

  int random(int below) { return static_cast<int>(random_() % below); }
  bool chance(int percent) { return random(100) < percent; }
  int random_peer();
  int random_communicator();
  void count() { ++log_.operations; }

  const Plan& plan_;
  Arena& arena_;
  const std::shared_ptr<Store> store_;
  const int rank_;
  RankLog& log_;
  std::mt19937_64 random_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<Group>> groups_;
  bool dead_[kCommunicators] = {};  // it failed, as this epoch wants it
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
  std::uint32_t next_sequence_[kCommunicators][kMaxRanks][kTags] = {};  // by receiver
  std::uint64_t seen_[kCommunicators][kMaxRanks][kTags] = {};           // by sender
  bool ended_[kCommunicators][kMaxRanks][kTags] = {};                   // by sender
  int step_ = 0;
};

// A random collective of the epoch, its result held against exact arithmetic.
void run_collective(Group& group, std::uint64_t seed);

// Holds what one rank received against what was sent to it. Throws Violation.
void check_channels(const Plan& plan, const Arena& arena, int rank);

}  // namespace dicomm::oracle
