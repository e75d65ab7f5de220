#include "collective/coalesced.h"

#include <algorithm>
#include <cstring>

#include "collective/scratch.h"
#include "collective/total_bytes.h"

namespace dicomm {

namespace {

// Of one vector, all ranks' blocks together.
constexpr std::size_t kPackBytes = 32 << 10;

// Writes blocks one behind the other, or reads them from there.
class Packer {
 public:
  explicit Packer(std::byte* at) : begin_(at), at_(at) {}
  void put(const void* data, std::size_t bytes) {
    if (bytes > 0) std::memcpy(at_, data, bytes);
    at_ += bytes;
  }
  void take(void* data, std::size_t bytes) {
    if (bytes > 0) std::memcpy(data, at_, bytes);
    at_ += bytes;
  }
  std::size_t bytes() const { return at_ - begin_; }
  std::byte* data() const { return begin_; }

 private:
  std::byte* begin_;
  std::byte* at_;
};

// Which of the vectors are short, and how long these are together.
struct Packed {
  std::vector<std::size_t> indices;
  std::size_t bytes = 0;

  // Packing one alone saves nothing.
  bool worthwhile() const { return indices.size() > 1; }
};

// length(i): bytes of vector i, all ranks'. Calls alone(i) for each that is not packed.
Packed pack_short(std::size_t vectors, const auto& length, const auto& alone) {
  Packed packed;
  for (std::size_t i = 0; i < vectors; ++i)
    if (length(i) <= kPackBytes) {
      packed.indices.push_back(i);
      packed.bytes += length(i);
    }
  for (std::size_t i = 0; i < vectors; ++i)
    if (length(i) > kPackBytes || !packed.worthwhile()) alone(i);
  return packed;
}

}  // namespace

std::int64_t allreduce_coalesced(Group& group, std::span<const Vector> vectors, DataType type,
                                 ReduceOp op, const Call& call) {
  check_reduction(type, op);
  const std::size_t width = element_bytes(type);
  std::int64_t done = 0;
  const Packed packed = pack_short(
      vectors.size(), [&](std::size_t i) { return vectors[i].count * width; },
      [&](std::size_t i) {
        done = std::max(done, allreduce(group, vectors[i].data, vectors[i].count, type, op, call));
      });
  if (!packed.worthwhile()) return done;
  Scratch scratch(packed.bytes);
  Packer in(scratch.data());
  for (const std::size_t i : packed.indices) in.put(vectors[i].data, vectors[i].count * width);
  done = std::max(done, allreduce(group, in.data(), in.bytes() / width, type, op, call));
  Packer out(scratch.data());
  for (const std::size_t i : packed.indices) out.take(vectors[i].data, vectors[i].count * width);
  return done;
}

std::int64_t allgather_coalesced(Group& group, std::span<const ConstBlock> inputs,
                                 std::span<const std::vector<Block>> outputs, const Call& call) {
  std::int64_t done = 0;
  const Packed packed = pack_short(
      inputs.size(), [&](std::size_t i) { return total_bytes(outputs[i]); },
      [&](std::size_t i) { done = std::max(done, allgather(group, inputs[i], outputs[i], call)); });
  if (!packed.worthwhile()) return done;
  Scratch scratch(packed.bytes);
  std::vector<Block> parts;
  std::byte* next = scratch.data();
  for (int rank = 0; rank < group.size(); ++rank) {
    std::size_t bytes = 0;
    for (const std::size_t i : packed.indices) bytes += outputs[i].at(rank).bytes;
    parts.push_back({next, bytes});
    next += bytes;
  }
  const Block own = parts[group.rank()];
  std::size_t own_bytes = 0;
  for (const std::size_t i : packed.indices) own_bytes += inputs[i].bytes;
  if (own_bytes != own.bytes)
    throw Error("allgather: inputs of " + std::to_string(own_bytes) + " bytes for outputs of " +
                std::to_string(own.bytes));
  Packer in(static_cast<std::byte*>(own.data));
  for (const std::size_t i : packed.indices) in.put(inputs[i].data, inputs[i].bytes);
  done = std::max(done, allgather(group, {own.data, own.bytes}, parts, call));
  Packer out(scratch.data());
  for (int rank = 0; rank < group.size(); ++rank)
    for (const std::size_t i : packed.indices)
      out.take(outputs[i][rank].data, outputs[i][rank].bytes);
  return done;
}

std::int64_t reduce_scatter_coalesced(Group& group, std::span<const std::vector<ConstBlock>> inputs,
                                      std::span<const Block> outputs, DataType type, ReduceOp op,
                                      const Call& call) {
  check_reduction(type, op);
  std::int64_t done = 0;
  const Packed packed = pack_short(
      inputs.size(), [&](std::size_t i) { return total_bytes(inputs[i]); },
      [&](std::size_t i) {
        done = std::max(done, reduce_scatter(group, inputs[i], outputs[i], type, op, call));
      });
  if (!packed.worthwhile()) return done;
  Scratch scratch(packed.bytes);
  Packer in(scratch.data());
  std::vector<ConstBlock> parts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::size_t begin = in.bytes();
    for (const std::size_t i : packed.indices)
      in.put(inputs[i].at(rank).data, inputs[i][rank].bytes);
    parts.push_back({scratch.data() + begin, in.bytes() - begin});
  }
  const ConstBlock own = parts[group.rank()];
  done = std::max(
      done, reduce_scatter(group, parts, {const_cast<void*>(own.data), own.bytes}, type, op, call));
  Packer out(static_cast<std::byte*>(const_cast<void*>(own.data)));
  for (const std::size_t i : packed.indices) out.take(outputs[i].data, outputs[i].bytes);
  return done;
}

}  // namespace dicomm
