#include "chip_reduction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>

#include "collective/bruck.h"
#include "collective/chunks.h"
#include "collective/doubling.h"
#include "core/clock.h"
#include "imported_memory.h"

namespace dicomm {

namespace {

// How much a chip reduces at a time, which bounds the memory that it needs for that.
std::size_t piece_bytes(const std::vector<at::Tensor>& sources) {
  constexpr std::size_t most_bytes = 4 << 20, alignment_bytes = 64;
  std::size_t longest = 0;
  for (const at::Tensor& source : sources) longest = std::max(longest, source.nbytes());
  return std::min(most_bytes, (longest + alignment_bytes - 1) / alignment_bytes * alignment_bytes);
}

void combine(at::Tensor& total, const at::Tensor& next, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      total.add_(next);
      return;
    case ReduceOp::product:
      total.mul_(next);
      return;
    case ReduceOp::min:
      at::minimum_out(total, total, next);
      return;
    case ReduceOp::max:
      at::maximum_out(total, total, next);
      return;
    case ReduceOp::band:
      total.bitwise_and_(next);
      return;
    case ReduceOp::bor:
      total.bitwise_or_(next);
      return;
    case ReduceOp::bxor:
      total.bitwise_xor_(next);
      return;
  }
}

std::vector<at::Tensor> contiguous(const std::vector<Staged>& tensors) {
  std::vector<at::Tensor> result;
  for (const Staged& tensor : tensors) result.push_back(tensor.contiguous());
  return result;
}

// Whether two of the tensors have bytes in common: then the order of the work would matter.
bool overlap(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  std::vector<std::pair<const std::byte*, const std::byte*>> stretches;
  for (const auto* tensors : {&some, &others})
    for (const at::Tensor& tensor : *tensors) {
      const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
      if (tensor.nbytes() > 0) stretches.emplace_back(begin, begin + tensor.nbytes());
    }
  std::sort(stretches.begin(), stretches.end());
  return std::adjacent_find(stretches.begin(), stretches.end(), [](const auto& a, const auto& b) {
           return b.first < a.second;
         }) != stretches.end();
}

std::vector<Staged> through_host(const std::vector<Staged>& tensors) {
  std::vector<Staged> result;
  for (const Staged& tensor : tensors) result.push_back(tensor.through_host());
  return result;
}

}  // namespace

ChipReduction::ChipReduction(Membership& membership, const Call& call,
                             const std::vector<Staged>& sources, const std::vector<Staged>& targets)
    : membership_(membership),
      exchange_(membership.group(), call),
      deadline_(deadline_after(call.timeout)),
      sources_(contiguous(sources)),
      piece_bytes_(piece_bytes(sources_)),
      device_(sources_.front().device()),
      memory_(is_paced() || overlap(sources_, contiguous(targets)) ? nullptr
                                                                   : chip_memory(device_.type())) {
  if (device_.is_cpu()) return;
  guard_.emplace(communication_stream(device_));
  for (const at::Tensor& source : sources_) keep_for_current_stream(source);
  for (const Staged& target : targets) keep_for_current_stream(target.contiguous());
}

Reach ChipReduction::begin(const std::vector<std::size_t>& reads) {
  std::vector<Card> mine;
  for (const at::Tensor& source : sources_) mine.push_back(card_of(source));
  if (memory_ && !reads.empty() && !take_scratch())
    mine.front().reach = std::min(mine.front().reach, Reach::not_now);
  cards_ = from_all(mine);
  check_lengths();
  Reach least = Reach::all;
  for (const Card& card : cards_) least = std::min(least, card.reach);
  if (least != Reach::all) return least;
  const auto answers = from_all(std::vector<Reach>{import(reads)});
  return *std::min_element(answers.begin(), answers.end());
}

// A link's pace is that of what hosts send.
bool ChipReduction::is_paced() const {
  Communicator& communicator = membership_.communicator();
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank() && communicator.link(peer).bytes_per_s > 0) return true;
  return false;
}

// For the piece that is added, then the total so far, which may be twice as wide.
bool ChipReduction::take_scratch() {
  try {
    scratch_ = at::empty({static_cast<std::int64_t>(3 * piece_bytes_)},
                         at::TensorOptions(device_).dtype(at::kByte));
    return true;
  } catch (const c10::Error& error) {  // the chip's memory is full
    warn_of_the_longer_way(error);
    return false;
  }
}

ChipReduction::Card ChipReduction::card_of(const at::Tensor& source) const {
  Card card{.handle = {}, .bytes = source.nbytes(), .reach = memory_ ? Reach::all : Reach::not_now};
  if (memory_ && card.bytes > 0) try {
      card.handle = memory_->export_from(device_.index(), source.const_data_ptr());
    } catch (const c10::Error& error) {
      warn_of_the_longer_way(error);
      card.reach = Reach::never;
    }
  return card;
}

template <class T>
std::vector<T> ChipReduction::from_all(const std::vector<T>& mine) {
  std::vector<T> all(mine.size() * size());
  std::copy(mine.begin(), mine.end(), all.begin() + rank() * mine.size());
  bruck_allgather(exchange_, chunks(all.data(), size(), mine.size() * sizeof(T), size()), 0);
  exchange_.finish();
  return all;
}

void ChipReduction::check_lengths() const {
  for (int peer = 0; peer < size(); ++peer)
    for (std::size_t source = 0; source < sources_.size(); ++source)
      if (card(peer, source).bytes != sources_[source].nbytes())
        throw Error("group rank " + std::to_string(peer) + " gave " +
                    std::to_string(card(peer, source).bytes) + " bytes where " +
                    std::to_string(sources_[source].nbytes()) +
                    " were expected: the ranks disagree on the sizes of this collective");
}

Reach ChipReduction::import(const std::vector<std::size_t>& reads) const {
  try {
    for (int peer = 0; peer < size(); ++peer)
      for (const std::size_t source : reads)
        if (peer != rank() && card(peer, source).bytes > 0)
          use_imported_memory(*memory_, device_.index(), card(peer, source).handle,
                              [this](const void*) { return StreamMark::here(device_); });
    return Reach::all;
  } catch (const c10::Error& error) {
    warn_of_the_longer_way(error);
    return Reach::never;
  }
}

ChipReduction::Part ChipReduction::share(std::size_t source, int rank, const Reduction& how) const {
  const std::size_t number_bytes = element_bytes(how.type);
  auto* const data = static_cast<std::byte*>(own(whole(source)));
  const std::size_t count = sources_[source].nbytes() / number_bytes;
  const Block part = chunks(data, count, number_bytes, size())[rank];
  const auto begin_bytes = static_cast<std::size_t>(static_cast<std::byte*>(part.data) - data);
  return {source, begin_bytes, part.bytes};
}

void* ChipReduction::own(const Part& part) const {
  const void* const data = sources_[part.source].const_data_ptr();
  return static_cast<std::byte*>(const_cast<void*>(data)) + part.begin_bytes;
}

void ChipReduction::reduce(const Part& part, const Reduction& how, void* into) {
  const at::NoGradGuard no_grad;
  for (std::size_t begin = 0; begin < part.bytes; begin += piece_bytes_) {
    const std::size_t bytes = std::min(piece_bytes_, part.bytes - begin);
    reduce_piece({part.source, part.begin_bytes + begin, bytes}, how,
                 static_cast<std::byte*>(into) + begin);
  }
}

// 16-bit floats are added up in float32, and rounded once.
void ChipReduction::reduce_piece(const Part& piece, const Reduction& how, void* into) {
  const auto bytes = static_cast<std::int64_t>(piece.bytes);
  const std::int64_t wider = element_bytes(accumulator(how.type)) / element_bytes(how.type);
  at::Tensor next = scratch_.narrow(0, 0, bytes).view(scalar_type(how.type));
  at::Tensor total = scratch_.narrow(0, static_cast<std::int64_t>(piece_bytes_), bytes * wider)
                         .view(scalar_type(accumulator(how.type)));
  at::Tensor& ends = wider > 1 ? next : total;  // where ranks' own type is, first and last
  copy_from(0, piece, ends.mutable_data_ptr());
  if (wider > 1) total.copy_(next);
  for (int rank = 1; rank < size(); ++rank) {
    copy_from(rank, piece, next.mutable_data_ptr());
    combine(total, next, how.op);
  }
  // By a number in the chip's memory: by one of the host's, GPUs multiply with its reciprocal.
  if (how.op == ReduceOp::avg) total.div_(at::scalar_tensor(size(), total.options()));
  if (wider > 1) next.copy_(total);
  memory_->copy(device_.index(), into, ends.const_data_ptr(), piece.bytes);
}

void ChipReduction::copy_from(int rank, const Part& part, void* to) const {
  if (rank == this->rank()) return memory_->copy(device_.index(), to, own(part), part.bytes);
  MemoryHandle there = card(rank, part.source).handle;
  there.offset_bytes += part.begin_bytes;
  use_imported_memory(*memory_, device_.index(), there, [&](const void* from) {
    memory_->copy(device_.index(), to, from, part.bytes);
    return StreamMark::here(device_);
  });
}

void ChipReduction::fetch(const Part& part, int peer) {
  if (part.bytes > 0) copy_from(peer, part, own(part));
}

void ChipReduction::finish_step() {
  const auto left = deadline_ - std::chrono::steady_clock::now();
  const bool is_done =
      StreamMark::here(device_).wait(left, "not done", [this] { return membership_.has_ended(); });
  if (!is_done && membership_.communicator().failure().empty())
    throw AbortedError("its group was left before this rank's chip was done");
  dissemination_barrier(exchange_, 0);
}

// The membership's queue holds the operation.
CollectiveWork::Operation reduction(Membership& membership, std::vector<Staged> sources,
                                    std::vector<Staged> targets, MayReach may_reach,
                                    OnChips on_chips, OnHost on_host) {
  return [=, &membership](Group& group, const Call& call) -> std::int64_t {
    if (!may_reach) return on_host(sources, targets, group, call);
    if (*may_reach) {
      ChipReduction chips(membership, call, sources, targets);
      const Reach reach = chips.begin(on_chips.reads);
      if (reach == Reach::all) {
        on_chips.run(chips);
        release_unused_imports();
        return 0;
      }
      if (reach == Reach::never) *may_reach = false;
    }
    c10::OptionalStreamGuard guard;
    if (const c10::Device device = sources.front().device(); !device.is_cpu())
      guard.reset_stream(communication_stream(device));
    const auto given = through_host(sources), filled = through_host(targets);
    const std::int64_t done_at_ns = on_host(given, filled, group, call);
    for (const auto* tensors : {&given, &filled})
      for (const Staged& tensor : *tensors) tensor.copy_back();
    return done_at_ns;
  };
}

}  // namespace dicomm
