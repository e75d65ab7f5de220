// Ranks as threads, in groups of many sizes and orders, on one node and spread over several; and
// what each of them sends. For collective_oracle.cpp and collective_messages.cpp.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "collective/group.h"
#include "core/request.h"
#include "memory_store.h"

namespace dicomm {

constexpr int kWorld = 16;

inline std::atomic<int> failures{0};

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  if (++failures < 20) std::printf("%s\n", what.c_str());
}

// Counts what a rank sends.
class Counting final : public Communicator {
 public:
  explicit Counting(std::shared_ptr<Communicator> real) : real_(std::move(real)) {}
  int rank() const override { return real_->rank(); }
  int world_size() const override { return real_->world_size(); }
  std::chrono::milliseconds timeout() const override { return real_->timeout(); }
  const std::string& secret() const override { return real_->secret(); }
  std::shared_ptr<Communicator> subgroup(std::shared_ptr<Store> store, const Options& options,
                                         const std::vector<int>& ranks) override {
    return real_->subgroup(std::move(store), options, ranks);
  }
  std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                                 std::int64_t ready_at_ns,
                                 std::shared_ptr<ChipWork> after) override {
    ++messages[peer];
    sent[peer] += bytes;
    return real_->isend(data, bytes, peer, tag, ready_at_ns, std::move(after));
  }
  std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                                 std::shared_ptr<ChipWork> after) override {
    return real_->irecv(data, capacity, peer, tag, std::move(after));
  }
  std::shared_ptr<Request> isend(std::shared_ptr<ChipBuffer> buffer, std::size_t bytes, int peer,
                                 std::uint64_t tag, std::shared_ptr<ChipWork> after) override {
    return real_->isend(std::move(buffer), bytes, peer, tag, std::move(after));
  }
  std::shared_ptr<Request> irecv(std::shared_ptr<ChipBuffer> buffer, std::size_t capacity, int peer,
                                 std::uint64_t tag) override {
    return real_->irecv(std::move(buffer), capacity, peer, tag);
  }
  void send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
            Timeout timeout) override {
    isend(data, bytes, peer, tag, 0, nullptr)->wait(timeout);
  }
  std::size_t recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                   Timeout timeout) override {
    return irecv(data, capacity, peer, tag, nullptr)->wait(timeout);
  }
  void start(RequestState& request, std::int64_t ready_at_ns) override {
    if (request.is_send) {
      ++messages[request.peer_number];
      sent[request.peer_number] += request.bytes;
    }
    real_->start(request, ready_at_ns);
  }
  void set_link(int peer, const LinkPace& pace) override { real_->set_link(peer, pace); }
  LinkPace link(int peer) const override { return real_->link(peer); }
  std::uint64_t bytes_sent(int peer) const override { return real_->bytes_sent(peer); }
  LinkDescription describe_link(int peer) const override { return real_->describe_link(peer); }
  void declare_memory(const MemoryRegion& region) override { real_->declare_memory(region); }
  void forget_memory(std::uint64_t address, std::uint64_t bytes) override {
    real_->forget_memory(address, bytes);
  }
  bool reaches_declared_memory() const override { return real_->reaches_declared_memory(); }
  void abort(const std::string& reason) override { real_->abort(reason); }
  void relay(const std::string& cause) override { real_->relay(cause); }
  std::string failure() const override { return real_->failure(); }
  void require_own_process() const override { real_->require_own_process(); }
  void close() override { real_->close(); }

  void reset() { messages = sent = std::vector<std::uint64_t>(kWorld); }
  std::vector<std::uint64_t> messages = std::vector<std::uint64_t>(kWorld);
  std::vector<std::uint64_t> sent = std::vector<std::uint64_t>(kWorld);

 private:
  std::shared_ptr<Communicator> real_;
};

inline void each(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        expect(false, "rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
}

class World {
 public:
  World() : communicators(kWorld) {
    const auto store = std::make_shared<MemoryStore>();
    each(kWorld, [&](int rank) {
      Options options;
      options.rank = rank;
      options.world_size = kWorld;
      options.secret = "of the test";
      options.timeout = std::chrono::seconds(60);
      communicators[rank] = std::make_shared<Counting>(Communicator::create(store, options));
    });
  }
  ~World() {
    each(kWorld, [&](int rank) { communicators[rank]->close(); });
  }

  std::vector<std::shared_ptr<Counting>> communicators;
};

// A group of the first `size` ranks, numbered backwards; group rank r is on node node_of(r).
class Ranks {
 public:
  Ranks(World& world, int size, const std::function<int(int)>& node_of) : world_(world) {
    static std::uint16_t id = 0;
    ++id;
    for (int r = 0; r < size; ++r) order_.push_back(size - 1 - r);
    for (int r = 0; r < size; ++r)
      groups_.push_back(std::make_unique<Group>(world.communicators[order_[r]], order_, id,
                                                "node " + std::to_string(node_of(r))));
  }
  int size() const { return static_cast<int>(order_.size()); }
  void run(const std::function<void(Group&)>& body) {
    each(size(), [&](int r) { body(*groups_[r]); });
  }
  Counting& counts(int rank) { return *world_.communicators[order_[rank]]; }
  void reset() {
    for (int r = 0; r < size(); ++r) counts(r).reset();
  }
  std::uint64_t messages(int from, int to) { return counts(from).messages[order_[to]]; }
  std::uint64_t sent(int from, int to) { return counts(from).sent[order_[to]]; }
  std::uint64_t messages_of(int from) {
    const auto& all = counts(from).messages;
    return std::accumulate(all.begin(), all.end(), std::uint64_t{0});
  }

 private:
  World& world_;
  std::vector<int> order_;
  std::vector<std::unique_ptr<Group>> groups_;
};

inline int one_node(int) { return 0; }

}  // namespace dicomm
