// Random collectives on integers: every result is known exactly.
#include "collective/collectives.h"

#include <random>
#include <vector>

#include "core/text.h"
#include "oracle/rank.h"
#include "support.h"

namespace dicomm::oracle {

namespace {

using Words = std::vector<std::int64_t>;

// Element i of what rank `from` gives to rank `to`.
std::int64_t element(std::uint64_t seed, int from, int to, std::size_t i) {
  return static_cast<std::int64_t>(testing::mix(seed, from, to) % 1000 + i);
}

Words input(std::uint64_t seed, int from, int to, std::size_t count) {
  Words words(count);
  for (std::size_t i = 0; i < count; ++i) words[i] = element(seed, from, to, i);
  return words;
}

void expect_equal(const Words& got, const Words& expected, const char* what) {
  if (got != expected)
    throw Violation(text(what, " of ", expected.size(), " words gave another result"));
}

Words sum_to(std::uint64_t seed, int size, int to, std::size_t count) {
  Words sum(count);
  for (int from = 0; from < size; ++from)
    for (std::size_t i = 0; i < count; ++i) sum[i] += element(seed, from, to, i);
  return sum;
}

template <class BlockType>
std::vector<BlockType> blocks(std::vector<Words>& words) {
  std::vector<BlockType> result;
  for (Words& block : words) result.push_back({block.data(), block.size() * 8});
  return result;
}

}  // namespace

void run_collective(Group& group, std::uint64_t seed) {
  const int rank = group.rank(), size = group.size();
  const std::size_t count = bytes_from(testing::mix(seed)) / 8;
  const int root = static_cast<int>(seed / 16 % size);
  const Call call{group.next_tag(), 0, std::chrono::seconds(100)};
  // Blocks of unlike lengths, some empty.
  const auto length = [&](int from, int to) {
    return testing::mix(seed, from, to, 1) % 3 * (count / 4);
  };
  switch (seed % 7) {
    case 0:
      barrier(group, call);
      return;
    case 1: {
      Words data = input(seed, rank, 0, count);
      allreduce(group, data.data(), count, DataType::int64, ReduceOp::sum, call);
      return expect_equal(data, sum_to(seed, size, 0, count), "allreduce");
    }
    case 2: {
      Words data = input(seed, rank, 0, count), out(count, -1);
      reduce(group, data.data(), out.data(), count, DataType::int64, ReduceOp::sum, root, call);
      if (rank == root) expect_equal(out, sum_to(seed, size, 0, count), "reduce");
      return;
    }
    case 3: {
      Words data = rank == root ? input(seed, root, 0, count) : Words(count, -1);
      broadcast(group, data.data(), count * 8, root, call);
      return expect_equal(data, input(seed, root, 0, count), "broadcast");
    }
    case 4: {
      Words own = input(seed, rank, 0, length(rank, 0));
      std::vector<Words> out;
      for (int from = 0; from < size; ++from) out.emplace_back(length(from, 0), -1);
      allgather(group, {own.data(), own.size() * 8}, blocks<Block>(out), call);
      for (int from = 0; from < size; ++from)
        expect_equal(out[from], input(seed, from, 0, length(from, 0)), "allgather");
      return;
    }
    case 5: {
      std::vector<Words> in, out;
      for (int peer = 0; peer < size; ++peer) {
        in.push_back(input(seed, rank, peer, length(rank, peer)));
        out.emplace_back(length(peer, rank), -1);
      }
      alltoall(group, blocks<ConstBlock>(in), blocks<Block>(out), call);
      for (int from = 0; from < size; ++from)
        expect_equal(out[from], input(seed, from, rank, length(from, rank)), "alltoall");
      return;
    }
    default: {
      std::vector<Words> in;
      for (int to = 0; to < size; ++to) in.push_back(input(seed, rank, to, length(0, to)));
      Words out(length(0, rank), -1);
      reduce_scatter(group, blocks<ConstBlock>(in), {out.data(), out.size() * 8}, DataType::int64,
                     ReduceOp::sum, call);
      return expect_equal(out, sum_to(seed, size, rank, out.size()), "reduce_scatter");
    }
  }
}

}  // namespace dicomm::oracle
