// Every collective against exact arithmetic. Prints what is wrong; exit code 0 if nothing is.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "collective/chunks.h"
#include "collective/coalesced.h"
#include "collective/slices.h"
#include "collective_world.h"

using namespace dicomm;

namespace {

constexpr DataType kTypes[] = {
    DataType::float32, DataType::float64, DataType::float16, DataType::bfloat16, DataType::int8,
    DataType::int16,   DataType::int32,   DataType::int64,   DataType::uint8,    DataType::boolean};

bool is_float(DataType type) { return type <= DataType::bfloat16; }

// To `bits` significant bits, ties to even.
double rounded(double value, int bits) {
  if (value == 0) return 0;
  int exponent;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits);
}

void write(void* data, std::size_t i, DataType type, double value) {
  switch (type) {
    case DataType::float32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case DataType::float64:
      static_cast<double*>(data)[i] = value;
      return;
    case DataType::bfloat16: {
      const float wide = static_cast<float>(rounded(value, 8));
      std::memcpy(static_cast<char*>(data) + 2 * i, reinterpret_cast<const char*>(&wide) + 2, 2);
      return;
    }
    case DataType::float16: {  // normal numbers and zero only
      int exponent = 0;
      const double fraction = std::frexp(std::fabs(rounded(value, 11)), &exponent);
      std::uint16_t bits = 0;
      if (fraction != 0)
        bits = static_cast<std::uint16_t>((exponent + 14) << 10 |
                                          (static_cast<int>(fraction * 2048) & 1023));
      if (value < 0) bits |= 0x8000;
      static_cast<std::uint16_t*>(data)[i] = bits;
      return;
    }
    default:
      break;
  }
  const auto whole = static_cast<std::int64_t>(value);
  const std::size_t width = element_bytes(type);
  const std::int64_t stored = type == DataType::boolean ? whole != 0 : whole;
  std::memcpy(static_cast<char*>(data) + width * i, &stored, width);
}

// Small whole numbers: sums and products are exact in double, and pass the range of int8.
double value_of(int rank, std::size_t i, DataType type, ReduceOp op) {
  const int seed = static_cast<int>((rank * 7919 + i * 104729 + 13) % 1009);
  if (type == DataType::boolean) return seed % 2;
  if (type == DataType::uint8) return seed % 4;
  if (op == ReduceOp::product) return seed % 3 == 0 ? -1 : seed % 3;
  return seed % 61 - 30 + (rank == 0 ? 200 * (is_float(type)) : 0);
}

double combined(const std::vector<double>& values, DataType type, ReduceOp op) {
  double result = values[0];
  const bool logical = type == DataType::boolean;
  for (std::size_t r = 1; r < values.size(); ++r) {
    const double v = values[r];
    const auto a = static_cast<std::int64_t>(result), b = static_cast<std::int64_t>(v);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        result = logical ? (a | b) : result + v;
        break;
      case ReduceOp::product:
        result *= v;
        break;
      case ReduceOp::min:
        result = std::min(result, v);
        break;
      case ReduceOp::max:
        result = std::max(result, v);
        break;
      case ReduceOp::band:
        result = a & b;
        break;
      case ReduceOp::bor:
        result = a | b;
        break;
      case ReduceOp::bxor:
        result = a ^ b;
        break;
    }
  }
  return op == ReduceOp::avg ? static_cast<double>(static_cast<float>(result) / values.size())
                             : result;
}

using Bytes = std::vector<std::byte>;

Bytes input_of(int rank, std::size_t first, std::size_t count, DataType type, ReduceOp op) {
  Bytes data(count * element_bytes(type));
  for (std::size_t i = 0; i < count; ++i)
    write(data.data(), i, type, value_of(rank, first + i, type, op));
  return data;
}

Bytes truth(int ranks, std::size_t first, std::size_t count, DataType type, ReduceOp op) {
  Bytes data(count * element_bytes(type));
  std::vector<double> values(ranks);
  for (std::size_t i = 0; i < count; ++i) {
    for (int r = 0; r < ranks; ++r) values[r] = value_of(r, first + i, type, op);
    double exact = combined(values, type, op);
    if (op == ReduceOp::avg && type == DataType::float64)
      exact = combined(values, type, ReduceOp::sum) / ranks;
    else if (op == ReduceOp::avg)
      exact = static_cast<float>(combined(values, type, ReduceOp::sum)) / static_cast<float>(ranks);
    write(data.data(), i, type, exact);
  }
  return data;
}

bool defined(DataType type, ReduceOp op) {
  try {
    check_reduction(type, op);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Of uneven blocks; some are empty.
std::size_t block_count(int rank, std::size_t scale) {
  return rank % 3 == 1 ? 0 : scale + 5 * rank;
}

void check_reductions(Ranks& ranks, DataType type, ReduceOp op, std::size_t count,
                      const std::string& where) {
  const int size = ranks.size();
  const std::size_t width = element_bytes(type);
  const Bytes total = truth(size, 0, count, type, op);
  const int root = size / 2;
  std::vector<std::size_t> first{0};
  for (int r = 0; r < size; ++r) first.push_back(first.back() + block_count(r, count));
  ranks.run([&](Group& group) {
    const int rank = group.rank();
    const std::string what = where + ", type " + std::to_string(static_cast<int>(type)) + ", op " +
                             std::to_string(static_cast<int>(op)) + ", count " +
                             std::to_string(count) + ", rank " + std::to_string(rank);
    const Bytes input = input_of(rank, 0, count, type, op);
    Bytes data = input;
    allreduce(group, data.data(), count, type, op, {group.next_tag()});
    expect(data == total, "allreduce " + what);
    data = input;
    Bytes output(rank == root ? data.size() : 0);
    reduce(group, data.data(), output.data(), count, type, op, root, {group.next_tag()});
    expect(data == input && (rank != root || output == total), "reduce " + what);

    const Bytes whole = input_of(rank, 0, first.back(), type, op);
    std::vector<ConstBlock> inputs;
    for (int r = 0; r < size; ++r)
      inputs.push_back({whole.data() + first[r] * width, (first[r + 1] - first[r]) * width});
    Bytes own(inputs[rank].bytes);
    reduce_scatter(group, inputs, {own.data(), own.size()}, type, op, {group.next_tag()});
    expect(own == truth(size, first[rank], block_count(rank, count), type, op),
           "reduce_scatter " + what);
  });
}

Bytes pattern(int from, int to, std::size_t bytes) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>((from * 31 + to * 17 + i * 7) & 255);
  return data;
}

std::vector<Block> blocks_of(std::vector<Bytes>& buffers) {
  std::vector<Block> blocks;
  for (Bytes& buffer : buffers) blocks.push_back({buffer.data(), buffer.size()});
  return blocks;
}

void check_moves(Ranks& ranks, std::size_t scale, const std::string& where) {
  const int size = ranks.size();
  const int root = size - 1;
  ranks.run([&](Group& group) {
    const int rank = group.rank();
    const std::string what = where + ", scale " + std::to_string(scale);
    Bytes data = rank == root ? pattern(root, 0, scale) : Bytes(scale);
    broadcast(group, data.data(), scale, root, {group.next_tag()});
    expect(data == pattern(root, 0, scale), "broadcast " + what);

    const Bytes own = pattern(rank, 1, block_count(rank, scale));
    std::vector<Bytes> from(size), expected(size);
    for (int r = 0; r < size; ++r) expected[r] = pattern(r, 1, block_count(r, scale));
    for (int r = 0; r < size; ++r) from[r].resize(expected[r].size());
    allgather(group, {own.data(), own.size()}, blocks_of(from), {group.next_tag()});
    expect(from == expected, "allgather " + what);

    for (int r = 0; r < size; ++r) from[r] = Bytes(rank == root ? expected[r].size() : 0);
    gather(group, {own.data(), own.size()}, blocks_of(from), root, {group.next_tag()});
    if (rank == root) expect(from == expected, "gather " + what);
    Bytes dealt(own.size());
    scatter(group, read_only(blocks_of(from)), {dealt.data(), dealt.size()}, root,
            {group.next_tag()});
    expect(dealt == own, "scatter " + what);

    std::vector<Bytes> to(size);
    for (int r = 0; r < size; ++r) {
      to[r] = pattern(rank, r, block_count(rank + r, scale));
      expected[r] = pattern(r, rank, block_count(rank + r, scale));
      from[r] = Bytes(expected[r].size());
    }
    alltoall(group, read_only(blocks_of(to)), blocks_of(from), {group.next_tag()});
    expect(from == expected, "alltoall " + what);

    Bytes packed, turned(size * scale), wanted;
    for (int r = 0; r < size; ++r) {
      const Bytes there = pattern(rank, r, scale), here = pattern(r, rank, scale);
      packed.insert(packed.end(), there.begin(), there.end());
      wanted.insert(wanted.end(), here.begin(), here.end());
    }
    alltoall_even(group, packed.data(), turned.data(), scale, {group.next_tag()});
    expect(turned == wanted, "alltoall_even " + what);
    Bytes all(rank == root ? size * scale : 0);
    gather_even(group, packed.data(), all.data(), scale, root, {group.next_tag()});
    for (int r = 0; r < size && rank == root; ++r)
      expect(std::equal(all.begin() + r * scale, all.begin() + (r + 1) * scale,
                        pattern(r, 0, scale).begin()),
             "gather_even " + what);
    Bytes one(scale);
    scatter_even(group, packed.data(), one.data(), scale, root, {group.next_tag()});
    expect(one == pattern(root, rank, scale), "scatter_even " + what);
    barrier(group, {group.next_tag()});
  });
}

// Sums whose rounding depends on the order: every rank must still have the same bits.
void check_equal_bits(Ranks& ranks, std::size_t count, const std::string& where) {
  for (const DataType type : {DataType::float32, DataType::bfloat16}) {
    std::vector<Bytes> results(ranks.size());
    ranks.run([&](Group& group) {
      Bytes data(count * element_bytes(type));
      for (std::size_t i = 0; i < count; ++i)
        write(data.data(), i, type, std::sin(1.0 + group.rank() * 977.0 + i) * std::pow(10, i % 7));
      allreduce(group, data.data(), count, type, ReduceOp::sum, {group.next_tag()});
      results[group.rank()] = data;
    });
    for (const Bytes& result : results) expect(result == results[0], "bits differ, " + where);
  }
}

void check_coalesced(Ranks& ranks, const std::string& where) {
  const std::size_t counts[] = {3, 0, 40'000, 17, 1};
  ranks.run([&](Group& group) {
    const auto type = DataType::float16;
    std::vector<Bytes> data, pieces;
    std::vector<Vector> vectors;
    for (const std::size_t count : counts)
      data.push_back(input_of(group.rank(), 0, count, type, ReduceOp::sum));
    for (std::size_t i = 0; i < data.size(); ++i) vectors.push_back({data[i].data(), counts[i]});
    allreduce_coalesced(group, vectors, type, ReduceOp::sum, {group.next_tag()});
    for (std::size_t i = 0; i < data.size(); ++i)
      expect(data[i] == truth(group.size(), 0, counts[i], type, ReduceOp::sum),
             "allreduce_coalesced " + where);

    std::vector<ConstBlock> inputs;
    std::vector<std::vector<Bytes>> gathered;
    std::vector<std::vector<Block>> outputs;
    for (std::size_t i = 0; i < data.size(); ++i) {
      pieces.push_back(pattern(group.rank(), static_cast<int>(i), counts[i]));
      gathered.emplace_back(group.size(), Bytes(counts[i]));
    }
    for (std::size_t i = 0; i < data.size(); ++i) {
      inputs.push_back({pieces[i].data(), counts[i]});
      outputs.push_back(blocks_of(gathered[i]));
    }
    allgather_coalesced(group, inputs, outputs, {group.next_tag()});
    for (std::size_t i = 0; i < data.size(); ++i)
      for (int r = 0; r < group.size(); ++r)
        expect(gathered[i][r] == pattern(r, static_cast<int>(i), counts[i]),
               "allgather_coalesced " + where);

    std::vector<std::vector<ConstBlock>> scattered;
    std::vector<Block> owns;
    for (std::size_t i = 0; i < data.size(); ++i)
      data[i] = input_of(group.rank(), 0, counts[i] * group.size(), type, ReduceOp::max);
    for (std::size_t i = 0; i < data.size(); ++i) {
      pieces[i].assign(counts[i] * 2, std::byte{0});
      scattered.push_back(read_only(chunks(data[i].data(), data[i].size() / 2, 2, group.size())));
      owns.push_back({pieces[i].data(), pieces[i].size()});
    }
    reduce_scatter_coalesced(group, scattered, owns, type, ReduceOp::max, {group.next_tag()});
    for (std::size_t i = 0; i < data.size(); ++i)
      expect(pieces[i] ==
                 truth(group.size(), counts[i] * group.rank(), counts[i], type, ReduceOp::max),
             "reduce_scatter_coalesced " + where);
  });
}

// Ranks 0.. in groups of 3, 2 and 1, each with shards of its own.
void check_slices(Ranks& ranks) {
  const std::vector<std::vector<int>> vendors{{0, 3, 5}, {1, 4}, {2}};
  const std::size_t count = 60'000;
  const auto type = DataType::bfloat16;
  const auto ranges = common_slices(count, vendors);
  expect(ranges.size() == 4, "the finest common slices of thirds and halves are four");
  ranks.run([&](Group& group) {
    int vendor = 0;
    for (int v = 0; v < 3; ++v)
      for (const int member : vendors[v])
        if (member == group.rank()) vendor = v;
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
      Bytes data = input_of(vendor, 0, count, type, ReduceOp::sum);
      const Bytes before = data;
      std::vector<Slice> slices;
      for (const Range& range : ranges)
        slices.push_back({data.data() + range.begin * 2, range.count, range.owners});
      allreduce_slices(group, slices, type, op, 3, {group.next_tag()});
      const Bytes total = truth(3, 0, count, type, op);
      for (const Range& range : ranges) {
        const bool owned = std::count(range.owners.begin(), range.owners.end(), group.rank()) > 0;
        const Bytes& expected = owned ? total : before;
        expect(std::equal(data.begin() + range.begin * 2,
                          data.begin() + (range.begin + range.count) * 2,
                          expected.begin() + range.begin * 2),
               "allreduce_slices");
      }
    }
  });
}

void check_results(World& world) {
  for (const int size : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
    const std::string where = std::to_string(size) + " ranks";
    Ranks flat(world, size, one_node);
    const bool whole = size == 2 || size == 5 || size >= 9;
    for (const DataType type : kTypes)
      for (int op = 0; op <= static_cast<int>(ReduceOp::bxor); ++op)
        if (defined(type, static_cast<ReduceOp>(op)) && (whole || op == 0))
          check_reductions(flat, type, static_cast<ReduceOp>(op), 7, where);
    for (const DataType type : {DataType::float32, DataType::bfloat16})
      for (const std::size_t count : {0, 1, 9'000})
        check_reductions(flat, type, ReduceOp::sum, count, where);
    if (whole) check_reductions(flat, DataType::float32, ReduceOp::sum, 150'003, where);
    if (size == 4 || size == 9)
      check_reductions(flat, DataType::bfloat16, ReduceOp::sum, 300'001, where);
    for (const std::size_t scale : {0, 3, 1'000}) check_moves(flat, scale, where);
    if (size == 3 || size == 9) check_moves(flat, 70'000, where);
    check_equal_bits(flat, 5'000, where);
    if (whole) check_equal_bits(flat, 100'001, where);
    check_coalesced(flat, where);
  }
  const std::map<std::string, std::pair<int, int (*)(int)>> layouts{
      {"2 nodes of 4", {8, [](int r) { return r / 4; }}},
      {"3 nodes of 3, dealt out", {9, [](int r) { return r % 3; }}},
      {"nodes of 4, 2 and 1", {7, [](int r) { return r < 4   ? 0
                                                     : r < 6 ? 1
                                                             : 2; }}},
      {"16 ranks, uneven and mixed", {16, [](int r) { return r * r % 5; }}},
  };
  for (const auto& [name, layout] : layouts) {
    Ranks spread(world, layout.first, layout.second);
    for (const DataType type : kTypes)
      check_reductions(spread, type, type == DataType::boolean ? ReduceOp::sum : ReduceOp::max, 7,
                       name);
    for (const std::size_t count : {0, 1, 9'000, 40'003})
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
        check_reductions(spread, DataType::bfloat16, op, count, name);
    check_reductions(spread, DataType::float64, ReduceOp::avg, 20'000, name);
    for (const std::size_t scale : {0, 3, 20'000}) check_moves(spread, scale, name);
    check_equal_bits(spread, 5'000, name);
    check_equal_bits(spread, 40'001, name);
    check_coalesced(spread, name);
  }
  Ranks six(world, 6, one_node);
  check_slices(six);
}

}  // namespace

int main() {
  {
    World world;
    check_results(world);
  }
  if (failures > 0) std::printf("%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
