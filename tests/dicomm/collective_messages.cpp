// How many messages and bytes each algorithm takes. Prints what is wrong; exit code 0 if nothing
// is.
#include <algorithm>
#include <numeric>

#include "collective/chunks.h"
#include "collective/coalesced.h"
#include "collective_world.h"

using namespace dicomm;

namespace {

void expect_count(std::uint64_t found, std::uint64_t wanted, const std::string& what) {
  expect(found == wanted,
         what + ": " + std::to_string(found) + ", expected " + std::to_string(wanted));
}

void allreduce_floats(Ranks& ranks, std::size_t count) {
  ranks.run([&](Group& group) {
    std::vector<float> data(count, 1);
    allreduce(group, data.data(), count, DataType::float32, ReduceOp::sum, {group.next_tag()});
  });
}

void check_messages(World& world) {
  Ranks sixteen(world, 16, one_node);
  Ranks nine(world, 9, one_node);
  Ranks four(world, 4, one_node);
  for (Ranks* ranks : {&sixteen, &nine, &four}) allreduce_floats(*ranks, 1);  // tells nodes
  const auto counted = [](Ranks& ranks, const auto& body) {
    ranks.reset();
    body();
  };
  counted(sixteen, [&] { allreduce_floats(sixteen, 1); });
  for (int r = 0; r < 16; ++r)
    expect_count(sixteen.messages_of(r), 4, "short allreduce of 16: recursive doubling");
  counted(sixteen, [&] { allreduce_floats(sixteen, 16'384); });
  for (int r = 0; r < 16; ++r) {
    expect_count(sixteen.messages_of(r), 8, "allreduce of 16, 64 KiB: halving and doubling");
    std::uint64_t bytes = 0;
    for (int to = 0; to < 16; ++to) bytes += sixteen.sent(r, to);
    expect_count(bytes, 2 * 15 * 4096, "allreduce of 16, 64 KiB: bytes");
  }
  counted(sixteen, [&] { allreduce_floats(sixteen, 1 << 18); });
  for (int r = 0; r < 16; ++r) {
    expect_count(sixteen.messages_of(r), 30, "allreduce of 16, 1 MiB: a ring");
    expect_count(sixteen.messages(r, (r + 1) % 16), 30, "allreduce of 16, 1 MiB: to the right");
  }
  counted(four, [&] { allreduce_floats(four, 1); });
  for (int r = 0; r < 4; ++r) expect_count(four.messages_of(r), 3, "short allreduce of 4: direct");
  counted(nine, [&] {
    nine.run([](Group& group) {
      std::vector<int> all(9, group.rank());
      allgather(group, {&all[group.rank()], 4}, chunks(all.data(), 9, 4, 9), {group.next_tag()});
    });
  });
  for (int r = 0; r < 9; ++r) expect_count(nine.messages_of(r), 4, "short allgather of 9: Bruck");
  counted(nine, [&] {
    nine.run([](Group& group) {
      std::vector<int> to(9), from(9);
      alltoall_even(group, to.data(), from.data(), 4, {group.next_tag()});
    });
  });
  for (int r = 0; r < 9; ++r) expect_count(nine.messages_of(r), 4, "short alltoall of 9: Bruck");
  counted(sixteen, [&] { sixteen.run([](Group& group) { barrier(group, {group.next_tag()}); }); });
  for (int r = 0; r < 16; ++r)
    expect_count(sixteen.messages_of(r), 4, "barrier of 16: dissemination");
  counted(sixteen, [&] {
    sixteen.run([](Group& group) {
      int value = 0;
      broadcast(group, &value, 4, 0, {group.next_tag()});
    });
  });
  expect_count(sixteen.messages_of(0), 4, "short broadcast of 16: the root of a tree");
  expect_count(sixteen.messages_of(15), 0, "short broadcast of 16: a leaf");
  counted(sixteen, [&] {
    sixteen.run([](Group& group) {
      int value = 0;
      std::vector<int> all(16);
      gather_even(group, &value, all.data(), 4, 0, {group.next_tag()});
    });
  });
  for (int r = 1; r < 16; ++r) expect_count(sixteen.messages_of(r), 1, "gather of 16: a tree");
  expect_count(sixteen.messages(15, 14), 1, "gather of 16: a leaf sends to its parent");
  counted(four, [&] {
    four.run([](Group& group) {
      std::vector<float> data(20 * 8, 1);
      std::vector<Vector> vectors;
      for (int i = 0; i < 20; ++i) vectors.push_back({&data[i * 8], 8});
      allreduce_coalesced(group, vectors, DataType::float32, ReduceOp::sum, {group.next_tag()});
    });
  });
  for (int r = 0; r < 4; ++r)
    expect_count(four.messages_of(r), 3, "20 short vectors coalesced: the messages of one");

  Ranks two_nodes(world, 8, [](int r) { return r / 4; });
  allreduce_floats(two_nodes, 1);
  counted(two_nodes, [&] { allreduce_floats(two_nodes, 1 << 18); });
  for (int r = 0; r < 8; ++r) {
    std::uint64_t across = 0;
    for (int to = 0; to < 8; ++to) across += r / 4 == to / 4 ? 0 : two_nodes.sent(r, to);
    expect_count(across, (1 << 20) / 4, "allreduce of 1 MiB over 2 nodes of 4: a rank's NIC");
    expect_count(two_nodes.sent(r, (r + 4) % 8), across, "it crosses between equal indices");
  }
  counted(two_nodes, [&] { allreduce_floats(two_nodes, 256); });
  expect_count(two_nodes.messages(0, 4), 1, "short allreduce over 2 nodes: between leaders");
  expect_count(two_nodes.messages_of(1), 1, "short allreduce over 2 nodes: others tell the leader");
}

}  // namespace

int main() {
  {
    World world;
    check_messages(world);
  }
  if (failures > 0) std::printf("%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
