// The collectives of the backend: torch's arguments checked and staged, libdicomm's called.
#include "collective/collectives.h"

#include <algorithm>
#include <numeric>

#include "backend.h"
#include "chip_reduction.h"
#include "collective/chunks.h"
#include "collective/coalesced.h"
#include "elements.h"

namespace dicomm {

namespace {

using c10d::OpType;
using Tensors = Backend::Tensors;

const Tensors& only_list(const std::vector<Tensors>& lists, const char* operation) {
  TORCH_CHECK(lists.size() == 1, "dicomm ", operation, ": one list of tensors expected, got ",
              lists.size());
  return lists.front();
}

void check_one_a_rank(const Tensors& tensors, int size, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(size), "dicomm ", operation, ": ",
                    tensors.size(), " tensors for a group of ", size, " ranks");
}

void check_same_type(const Tensors& tensors, const at::Tensor& like, const char* operation) {
  for (const at::Tensor& tensor : tensors)
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device(), "dicomm ",
        operation, ": every tensor must be ", like.scalar_type(), " on ", like.device(), ", got ",
        tensor.scalar_type(), " on ", tensor.device());
}

// Of tensors that go together; their types may differ.
void check_same_device(const Tensors& tensors, const char* operation) {
  TORCH_CHECK_VALUE(!tensors.empty(), "dicomm ", operation, ": no tensors");
  for (const at::Tensor& tensor : tensors)
    TORCH_CHECK_VALUE(tensor.device() == tensors.front().device(), "dicomm ", operation,
                      ": every tensor must be on ", tensors.front().device(), ", got one on ",
                      tensor.device());
}

void check_times(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation) {
  check_same_type({whole}, part, operation);
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, "dicomm ", operation, ": ", whole.numel(),
                    " elements are not ", size, " times ", part.numel());
}

std::vector<Reduction> reductions_of(const Tensors& tensors, const c10d::ReduceOp& op) {
  std::vector<Reduction> result;
  for (const at::Tensor& tensor : tensors) result.push_back(reduction_of(tensor, op));
  return result;
}

// Which tensors are reduced alike, and so can go together.
std::vector<std::vector<std::size_t>> alike(const std::vector<Reduction>& reductions) {
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < reductions.size(); ++i) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
      return reductions[group.front()] == reductions[i];
    });
    found == groups.end() ? groups.push_back({i}) : found->push_back(i);
  }
  return groups;
}

// The first so many tensors, by number.
std::vector<std::size_t> every(std::size_t count) {
  std::vector<std::size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  return numbers;
}

bool still(const MayReach& may_reach) { return may_reach && *may_reach; }

std::vector<Block> blocks(const std::vector<Staged>& tensors) {
  std::vector<Block> result;
  for (const Staged& tensor : tensors) result.push_back({tensor.data(), tensor.bytes()});
  return result;
}

std::vector<ConstBlock> const_blocks(const std::vector<Staged>& tensors) {
  std::vector<ConstBlock> result;
  for (const Staged& tensor : tensors) result.push_back({tensor.data(), tensor.bytes()});
  return result;
}

std::vector<Staged> together(std::vector<Staged> first, const std::vector<Staged>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// A tensor's rows dealt out to the ranks: `splits` rows each, or evenly.
std::vector<Block> rows(const Staged& tensor, std::int64_t length, int size,
                        const std::vector<std::int64_t>& splits, const char* operation) {
  std::vector<std::int64_t> counts = splits;
  if (counts.empty()) {
    TORCH_CHECK_VALUE(length % size == 0, "dicomm ", operation, ": ", length,
                      " rows do not divide evenly over ", size, " ranks");
    counts.assign(size, length / size);
  }
  TORCH_CHECK_VALUE(counts.size() == static_cast<std::size_t>(size) &&
                        std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == length,
                    "dicomm ", operation, ": ", size, " split sizes that sum to ", length,
                    " rows expected");
  const std::size_t row_bytes = length == 0 ? 0 : tensor.bytes() / length;
  std::vector<Block> result;
  std::byte* next = static_cast<std::byte*>(tensor.data());
  for (const std::int64_t count : counts) {
    TORCH_CHECK_VALUE(count >= 0, "dicomm ", operation, ": negative split size ", count);
    result.push_back({next, count * row_bytes});
    next += count * row_bytes;
  }
  return result;
}

std::vector<Block> equal_parts(const Staged& tensor, int size) {
  return chunks(tensor.data(), tensor.bytes(), 1, size);
}

std::int64_t rows_of(const at::Tensor& tensor) { return tensor.dim() == 0 ? 1 : tensor.size(0); }

}  // namespace

template <class CallOptions>
Backend::WorkPtr Backend::launch(OpType type, const char* title, const CallOptions& options,
                                 Tensors inputs, Tensors results, std::vector<Staged> staged,
                                 CollectiveWork::Operation operation) {
  const c10::Device device = results.empty() ? c10::Device(c10::kCPU) : results.front().device();
  const bool staged_on_host = staging() == Strategy::cpu_mediated && !device.is_cpu();
  if (!staged_on_host) carry_clocks(device);
  ++collectives_called_;
  std::vector<StreamMark> there;
  for (const Staged& tensor : staged) there.push_back(tensor.there());
  std::erase_if(staged, [](const Staged& tensor) { return !tensor.must_copy_back(); });
  StreamMark called = staged.empty() ? StreamMark() : StreamMark::here(device);
  const auto timeout =
      options.timeout == c10d::kUnsetTimeout ? membership_->timeout() : options.timeout;
  return track(CollectiveWork::enqueue(
      membership_,
      {type, title, device, staged_on_host, std::move(inputs), std::move(results), std::move(there),
       std::move(staged), std::move(called), std::move(operation), timeout},
      options.asyncOp));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  const Staged buffer = stage(tensor, rank_ == root ? Access::read : Access::write);
  return launch(OpType::BROADCAST, "dicomm:broadcast", options, tensors, tensors, {buffer},
                [=](Group& group, const Call& call) {
                  return dicomm::broadcast(group, buffer.data(), buffer.bytes(), root, call);
                });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only_tensor(tensors, "all_reduce");
  c10d::AllreduceCoalescedOptions coalesced;
  static_cast<c10d::AllreduceOptions&>(coalesced) = options;
  return allreduce_coalesced(tensors, coalesced);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  check_same_device(tensors, "all_reduce");
  const MayReach may_reach = reduces_on_chips(tensors);
  const bool on_chip = still(may_reach);
  const auto reductions = reductions_of(tensors, options.reduceOp);
  const auto buffers = stage(tensors, Access::read_write, on_chip);
  const auto on_chips = [=](ChipReduction& chips) {
    for (std::size_t i = 0; i < reductions.size(); ++i)
      chips.reduce_in_place(chips.share(i, chips.rank(), reductions[i]), reductions[i]);
    chips.finish_step();
    for (std::size_t i = 0; i < reductions.size(); ++i)
      for (int step = 1; step < chips.size(); ++step) {  // not all from the same chip at a time
        const int peer = (chips.rank() + step) % chips.size();
        chips.fetch(chips.share(i, peer, reductions[i]), peer);
      }
    chips.finish_step();
  };
  const auto on_host = [=](const auto& buffers, const auto&, Group& group, const Call& call) {
    std::int64_t done_at_ns = 0;
    for (const auto& together : alike(reductions)) {
      const auto& [type, op, numbers] = reductions[together.front()];
      std::vector<Vector> vectors;
      for (const std::size_t i : together)
        vectors.push_back({buffers[i].data(), buffers[i].count() * numbers});
      done_at_ns =
          std::max(done_at_ns, dicomm::allreduce_coalesced(group, vectors, type, op, call));
    }
    return done_at_ns;
  };
  const OpType name = tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED;
  return launch(
      name, "dicomm:all_reduce", options, tensors, tensors, buffers,
      reduction(*membership_, buffers, {}, may_reach, {every(tensors.size()), on_chips}, on_host));
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = static_cast<int>(options.rootRank);
  TORCH_CHECK_VALUE(root >= 0 && root < size_, "dicomm reduce: root ", root, " is not one of the ",
                    size_, " ranks of the group");
  const MayReach may_reach = reduces_on_chips(tensors);
  const bool on_chip = still(may_reach);
  const Reduction how = reduction_of(tensor, options.reduceOp);
  const Staged buffer = stage(tensor, rank_ == root ? Access::read_write : Access::read, on_chip);
  const auto on_chips = [=](ChipReduction& chips) {
    if (chips.rank() == root) chips.reduce_in_place(chips.whole(0), how);
    chips.finish_step();
  };
  const auto on_host = [=](const auto& buffers, const auto&, Group& group, const Call& call) {
    const Staged& buffer = buffers.front();
    return dicomm::reduce(group, buffer.data(), buffer.data(),
                          buffer.count() * how.numbers_per_element, how.type, how.op, root, call);
  };
  return launch(OpType::REDUCE, "dicomm:reduce", options, tensors, tensors, {buffer},
                reduction(*membership_, {buffer}, {}, may_reach,
                          {rank_ == root ? every(1) : every(0), on_chips}, on_host));
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& output_lists, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  const Tensors& outputs = only_list(output_lists, "all_gather");
  only_tensor(inputs, "all_gather");
  check_one_a_rank(outputs, size_, "all_gather");
  std::vector<Tensors> by_rank;
  for (const at::Tensor& output : outputs) by_rank.push_back({output});
  return allgather_coalesced(by_rank, inputs, options);
}

// output_lists[rank][i] comes from that rank's inputs[i].
Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& output_lists, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  check_same_device(inputs, "all_gather");
  TORCH_CHECK_VALUE(output_lists.size() == static_cast<std::size_t>(size_),
                    "dicomm all_gather: ", output_lists.size(), " lists of outputs for a group of ",
                    size_, " ranks");
  const auto sources = stage(inputs, Access::read);
  std::vector<std::vector<Staged>> targets(inputs.size());
  Tensors results;
  std::vector<Staged> staged = sources;
  for (const Tensors& list : output_lists) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "dicomm all_gather: ", list.size(),
                      " outputs of a rank for ", inputs.size(), " inputs");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_same_type({list[i]}, inputs[i], "all_gather");
      targets[i].push_back(stage(list[i], Access::write));
      staged.push_back(targets[i].back());
      results.push_back(list[i]);
    }
  }
  return launch(OpType::ALLGATHER, "dicomm:all_gather", options, inputs, results, staged,
                [=](Group& group, const Call& call) {
                  std::vector<std::vector<Block>> parts;
                  for (const auto& target : targets) parts.push_back(blocks(target));
                  return dicomm::allgather_coalesced(group, const_blocks(sources), parts, call);
                });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "dicomm all_gather_into_tensor: one output for every input expected");
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_times(outputs[i], inputs[i], size_, "all_gather_into_tensor");
  const auto sources = stage(inputs, Access::read);
  const auto targets = stage(outputs, Access::write);
  return launch(OpType::_ALLGATHER_BASE, "dicomm:all_gather_into_tensor", options, inputs, outputs,
                together(sources, targets), [=](Group& group, const Call& call) {
                  std::vector<std::vector<Block>> parts;
                  for (const Staged& target : targets)
                    parts.push_back(equal_parts(target, group.size()));
                  return dicomm::allgather_coalesced(group, const_blocks(sources), parts, call);
                });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& input_lists,
                                         const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_tensor(outputs, "reduce_scatter");
  const Tensors& inputs = only_list(input_lists, "reduce_scatter");
  check_one_a_rank(inputs, size_, "reduce_scatter");
  check_same_type(inputs, output, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs[rank_].numel() == output.numel(), "dicomm reduce_scatter: input ", rank_,
                    ", which is this rank's, has ", inputs[rank_].numel(),
                    " elements and its output ", output.numel());
  const MayReach may_reach = reduces_on_chips(inputs);
  const bool on_chip = still(may_reach);
  const Reduction how = reduction_of(output, options.reduceOp);
  const auto sources = stage(inputs, Access::read, on_chip);
  const Staged target = stage(output, Access::write, on_chip);
  const auto on_chips = [=](ChipReduction& chips) {
    chips.reduce(chips.whole(chips.rank()), how, target.data());
    chips.finish_step();
  };
  const auto on_host = [=](const auto& sources, const auto& targets, Group& group,
                           const Call& call) {
    return dicomm::reduce_scatter(group, const_blocks(sources), blocks(targets).front(), how.type,
                                  how.op, call);
  };
  return launch(OpType::REDUCE_SCATTER, "dicomm:reduce_scatter", options, inputs, outputs,
                together(sources, {target}),
                reduction(*membership_, sources, {target}, may_reach,
                          {{static_cast<std::size_t>(rank_)}, on_chips}, on_host));
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "dicomm reduce_scatter_tensor: one output for every input expected");
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check_times(inputs[i], outputs[i], size_, "reduce_scatter_tensor");
  check_same_device(outputs, "reduce_scatter_tensor");
  const MayReach may_reach = reduces_on_chips(inputs);
  const bool on_chip = still(may_reach);
  const auto reductions = reductions_of(outputs, options.reduceOp);
  const auto sources = stage(inputs, Access::read, on_chip);
  const auto targets = stage(outputs, Access::write, on_chip);
  const auto on_chips = [=](ChipReduction& chips) {
    for (std::size_t i = 0; i < reductions.size(); ++i)
      chips.reduce(chips.share(i, chips.rank(), reductions[i]), reductions[i], targets[i].data());
    chips.finish_step();
  };
  const auto on_host = [=](const auto& sources, const auto& targets, Group& group,
                           const Call& call) {
    std::int64_t done_at_ns = 0;
    for (const auto& together : alike(reductions)) {
      const auto& [type, op, numbers] = reductions[together.front()];
      std::vector<std::vector<ConstBlock>> from;
      std::vector<Block> to;
      for (const std::size_t i : together) {
        from.push_back(read_only(equal_parts(sources[i], group.size())));
        to.push_back({targets[i].data(), targets[i].bytes()});
      }
      done_at_ns =
          std::max(done_at_ns, dicomm::reduce_scatter_coalesced(group, from, to, type, op, call));
    }
    return done_at_ns;
  };
  return launch(OpType::_REDUCE_SCATTER_BASE, "dicomm:reduce_scatter_tensor", options, inputs,
                outputs, together(sources, targets),
                reduction(*membership_, sources, targets, may_reach,
                          {every(inputs.size()), on_chips}, on_host));
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& output_lists, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  const at::Tensor& input = only_tensor(inputs, "gather");
  const int root = static_cast<int>(options.rootRank);
  const Tensors results = rank_ == root ? only_list(output_lists, "gather") : inputs;
  if (rank_ == root) check_one_a_rank(results, size_, "gather");
  check_same_type(results, input, "gather");
  const Staged source = stage(input, Access::read);
  std::vector<Staged> targets;
  if (rank_ == root) targets = stage(results, Access::write);
  return launch(OpType::GATHER, "dicomm:gather", options, inputs, results,
                together({source}, targets), [=](Group& group, const Call& call) {
                  return dicomm::gather(group, {source.data(), source.bytes()}, blocks(targets),
                                        root, call);
                });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& input_lists,
                                  const c10d::ScatterOptions& options) {
  const at::Tensor& output = only_tensor(outputs, "scatter");
  const int root = static_cast<int>(options.rootRank);
  std::vector<Staged> sources;
  if (rank_ == root) {
    const Tensors& inputs = only_list(input_lists, "scatter");
    check_one_a_rank(inputs, size_, "scatter");
    check_same_type(inputs, output, "scatter");
    sources = stage(inputs, Access::read);
  }
  const Staged target = stage(output, Access::write);
  return launch(OpType::SCATTER, "dicomm:scatter", options, outputs, outputs,
                together(sources, {target}), [=](Group& group, const Call& call) {
                  return dicomm::scatter(group, const_blocks(sources),
                                         {target.data(), target.bytes()}, root, call);
                });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  check_one_a_rank(outputs, size_, "all_to_all");
  check_one_a_rank(inputs, size_, "all_to_all");
  check_same_type(inputs, outputs.front(), "all_to_all");
  check_same_type(outputs, outputs.front(), "all_to_all");
  const auto sources = stage(inputs, Access::read);
  const auto targets = stage(outputs, Access::write);
  return launch(OpType::ALLTOALL, "dicomm:all_to_all", options, inputs, outputs,
                together(sources, targets), [=](Group& group, const Call& call) {
                  return dicomm::alltoall(group, const_blocks(sources), blocks(targets), call);
                });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  constexpr const char* name = "all_to_all_single";
  check_same_type({input}, output, name);
  const Staged source = stage(input, Access::read);
  const Staged target = stage(output, Access::write);
  const auto from = read_only(rows(source, rows_of(input), size_, input_splits, name));
  const auto to = rows(target, rows_of(output), size_, output_splits, name);
  const bool even = input_splits.empty() && output_splits.empty();
  TORCH_CHECK_VALUE(!even || input.numel() == output.numel(), "dicomm ", name, ": ", input.numel(),
                    " elements to send and ", output.numel(), " to receive, without split sizes");
  return launch(OpType::ALLTOALL_BASE, "dicomm:all_to_all_single", options, {input}, {output},
                {source, target}, [=](Group& group, const Call& call) {
                  if (even)
                    return dicomm::alltoall_even(group, source.data(), target.data(),
                                                 from.front().bytes, call);
                  return dicomm::alltoall(group, from, to, call);
                });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return launch(OpType::BARRIER, "dicomm:barrier", options, {}, {}, {},
                [](Group& group, const Call& call) { return dicomm::barrier(group, call); });
}

}  // namespace dicomm
