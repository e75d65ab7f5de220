// The collectives of the backend: torch's arguments checked and staged, libdicomm's called.
#include "collective/collectives.h"

#include <numeric>

#include "backend.h"
#include "collective/chunks.h"

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

void check_times(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation) {
  check_same_type({whole}, part, operation);
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, "dicomm ", operation, ": ", whole.numel(),
                    " elements are not ", size, " times ", part.numel());
}

DataType data_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DataType::float32;
    case at::kDouble:
      return DataType::float64;
    case at::kHalf:
      return DataType::float16;
    case at::kBFloat16:
      return DataType::bfloat16;
    case at::kChar:
      return DataType::int8;
    case at::kShort:
      return DataType::int16;
    case at::kInt:
      return DataType::int32;
    case at::kLong:
      return DataType::int64;
    case at::kByte:
      return DataType::uint8;
    case at::kBool:
      return DataType::boolean;
    default:
      TORCH_CHECK_TYPE(false, "dicomm: no reductions over ", tensor.scalar_type());
  }
}

ReduceOp reduce_op(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  constexpr ReduceOp known[] = {ReduceOp::sum, ReduceOp::avg,  ReduceOp::product, ReduceOp::min,
                                ReduceOp::max, ReduceOp::band, ReduceOp::bor,     ReduceOp::bxor};
  static_assert(c10d::ReduceOp::BXOR == 7);
  TORCH_CHECK_VALUE(op.op_ <= c10d::ReduceOp::BXOR, "dicomm: this reduction is not supported; ",
                    "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR are");
  try {
    check_reduction(data_type(tensor), known[op.op_]);
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, "dicomm: ", error.what());
  }
  return known[op.op_];
}

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
                                 Tensors results, std::vector<Staged> outputs,
                                 CollectiveWork::Operation operation) {
  const c10::Device device = results.empty() ? c10::Device(c10::kCPU) : results.front().device();
  const bool staged_on_host = strategy_ == Strategy::cpu_mediated && !device.is_cpu();
  if (!staged_on_host) carry_clocks(device);
  ++collectives_called_;
  std::erase_if(outputs, [](const Staged& output) { return !output.must_copy_back(); });
  const auto timeout =
      options.timeout == c10d::kUnsetTimeout ? membership_->timeout() : options.timeout;
  return track(CollectiveWork::enqueue(membership_,
                                       {type, title, device, staged_on_host, std::move(results),
                                        std::move(outputs), std::move(operation), timeout},
                                       options.asyncOp));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  const Staged buffer = stage(tensor, rank_ == root ? Access::read : Access::write);
  return launch(OpType::BROADCAST, "dicomm:broadcast", options, tensors, {buffer},
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
  TORCH_CHECK_VALUE(!tensors.empty(), "dicomm all_reduce: no tensors");
  check_same_type(tensors, tensors.front(), "all_reduce");
  const auto buffers = stage(tensors, Access::read_write);
  const DataType type = data_type(tensors.front());
  const ReduceOp op = reduce_op(options.reduceOp, tensors.front());
  const OpType name = tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED;
  return launch(
      name, "dicomm:all_reduce", options, tensors, buffers, [=](Group& group, const Call& call) {
        std::int64_t done_at_ns = 0;
        for (const Staged& buffer : buffers)
          done_at_ns = std::max(
              done_at_ns, dicomm::allreduce(group, buffer.data(), buffer.count(), type, op, call));
        return done_at_ns;
      });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = static_cast<int>(options.rootRank);
  const Staged buffer = stage(tensor, rank_ == root ? Access::read_write : Access::read);
  const DataType type = data_type(tensor);
  const ReduceOp op = reduce_op(options.reduceOp, tensor);
  return launch(OpType::REDUCE, "dicomm:reduce", options, tensors, {buffer},
                [=](Group& group, const Call& call) {
                  return dicomm::reduce(group, buffer.data(), buffer.data(), buffer.count(), type,
                                        op, root, call);
                });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& output_lists, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  only_list(output_lists, "all_gather");
  only_tensor(inputs, "all_gather");
  return allgather_coalesced(output_lists, inputs, options);
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& output_lists, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && output_lists.size() == inputs.size(),
                    "dicomm all_gather: one list of outputs for every input expected");
  const auto sources = stage(inputs, Access::read);
  std::vector<std::vector<Staged>> targets;
  Tensors results;
  std::vector<Staged> outputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_one_a_rank(output_lists[i], size_, "all_gather");
    check_same_type(output_lists[i], inputs[i], "all_gather");
    targets.push_back(stage(output_lists[i], Access::write));
    results.insert(results.end(), output_lists[i].begin(), output_lists[i].end());
    outputs.insert(outputs.end(), targets[i].begin(), targets[i].end());
  }
  return launch(OpType::ALLGATHER, "dicomm:all_gather", options, results, outputs,
                [=](Group& group, const Call& call) {
                  std::int64_t done_at_ns = 0;
                  for (std::size_t i = 0; i < sources.size(); ++i) {
                    const ConstBlock source{sources[i].data(), sources[i].bytes()};
                    done_at_ns = std::max(
                        done_at_ns, dicomm::allgather(group, source, blocks(targets[i]), call));
                  }
                  return done_at_ns;
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
  return launch(OpType::_ALLGATHER_BASE, "dicomm:all_gather_into_tensor", options, outputs, targets,
                [=](Group& group, const Call& call) {
                  std::int64_t done_at_ns = 0;
                  for (std::size_t i = 0; i < sources.size(); ++i) {
                    const ConstBlock source{sources[i].data(), sources[i].bytes()};
                    const auto parts = equal_parts(targets[i], group.size());
                    done_at_ns =
                        std::max(done_at_ns, dicomm::allgather(group, source, parts, call));
                  }
                  return done_at_ns;
                });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& input_lists,
                                         const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_tensor(outputs, "reduce_scatter");
  const Tensors& inputs = only_list(input_lists, "reduce_scatter");
  check_one_a_rank(inputs, size_, "reduce_scatter");
  check_same_type(inputs, output, "reduce_scatter");
  const auto sources = stage(inputs, Access::read);
  const Staged target = stage(output, Access::write);
  const DataType type = data_type(output);
  const ReduceOp op = reduce_op(options.reduceOp, output);
  return launch(OpType::REDUCE_SCATTER, "dicomm:reduce_scatter", options, outputs, {target},
                [=](Group& group, const Call& call) {
                  return dicomm::reduce_scatter(group, const_blocks(sources),
                                                {target.data(), target.bytes()}, type, op, call);
                });
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
  check_same_type(outputs, outputs.front(), "reduce_scatter_tensor");
  const auto sources = stage(inputs, Access::read);
  const auto targets = stage(outputs, Access::write);
  const DataType type = data_type(outputs.front());
  const ReduceOp op = reduce_op(options.reduceOp, outputs.front());
  return launch(OpType::_REDUCE_SCATTER_BASE, "dicomm:reduce_scatter_tensor", options, outputs,
                targets, [=](Group& group, const Call& call) {
                  std::int64_t done_at_ns = 0;
                  for (std::size_t i = 0; i < sources.size(); ++i) {
                    const Block target{targets[i].data(), targets[i].bytes()};
                    const auto parts = read_only(equal_parts(sources[i], group.size()));
                    done_at_ns = std::max(
                        done_at_ns, dicomm::reduce_scatter(group, parts, target, type, op, call));
                  }
                  return done_at_ns;
                });
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
  return launch(OpType::GATHER, "dicomm:gather", options, results, targets,
                [=](Group& group, const Call& call) {
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
  return launch(OpType::SCATTER, "dicomm:scatter", options, outputs, {target},
                [=](Group& group, const Call& call) {
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
  return launch(OpType::ALLTOALL, "dicomm:all_to_all", options, outputs, targets,
                [=](Group& group, const Call& call) {
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
  return launch(OpType::ALLTOALL_BASE, "dicomm:all_to_all_single", options, {output}, {target},
                [=](Group& group, const Call& call) {
                  (void)source, (void)target;  // keep the memory that the blocks point into
                  return dicomm::alltoall(group, from, to, call);
                });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return launch(OpType::BARRIER, "dicomm:barrier", options, {}, {},
                [](Group& group, const Call& call) { return dicomm::barrier(group, call); });
}

}  // namespace dicomm
