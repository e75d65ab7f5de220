// Four ranks as threads on one communicator each: collectives of the world and of two overlapping
// groups of other orders, in flight at once. Prints what is wrong; exit code 0 if nothing is.
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collective/collectives.h"
#include "memory_store.h"

using namespace dicomm;

namespace {

std::atomic<int> failures{0};

void expect(bool holds, int rank, const char* what) {
  if (holds) return;
  ++failures;
  std::printf("rank %d: %s\n", rank, what);
}

void expect_sum(Group& group, float own, std::size_t count, float sum, const char* what) {
  std::vector<float> data(count, own);
  allreduce(group, data.data(), count, DataType::float32, ReduceOp::sum, {group.next_tag()});
  for (const float value : data)
    if (value != sum) return expect(false, group.rank(), what);
}

void run_rank(std::shared_ptr<Store> store, int rank) {
  Options options;
  options.rank = rank;
  options.world_size = 4;
  options.secret = "of the test";
  const auto communicator = Communicator::create(store, options);
  const bool odd = rank % 2;
  Group world(communicator);
  Group half(communicator, odd ? std::vector<int>{3, 1} : std::vector<int>{0, 2}, odd ? 2 : 1);
  for (int round = 0; round < 20; ++round) {
    for (const std::size_t count : {1, 100, 100'000}) {
      std::thread other([&] { expect_sum(world, rank + 1, count, 10, "sum over the world"); });
      expect_sum(half, rank + 1, count, odd ? 6 : 4, "sum over half the world");
      other.join();
    }
    int first = rank;
    broadcast(half, &first, sizeof first, 0, {half.next_tag()});
    expect(first == (odd ? 3 : 0), rank, "group rank 0 is the first that was named");
  }
  try {
    Group foreign(communicator, {(rank + 1) % 4});
    expect(false, rank, "a group without this rank was accepted");
  } catch (const Error&) {
  }
  barrier(world, {world.next_tag()});
  communicator->close();
}

}  // namespace

int main() {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        run_rank(store, rank);
      } catch (const std::exception& error) {
        expect(false, rank, error.what());
      }
    });
  for (std::thread& rank : ranks) rank.join();
  return failures == 0 ? 0 : 1;
}
