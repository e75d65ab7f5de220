#include "mixed_steps.h"

#include <algorithm>

#include "collective/partial.h"
#include "collective/slices.h"
#include "elements.h"

namespace dicomm {

c10d::ReduceOp native_op(const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}

MixedBackend::Steps::Steps(const Parts& parts, c10::Device device, Group& group, const Call& call)
    : vendors(parts.vendors), parts_(parts), timeline_(device), group_(group), call_(call) {}

void MixedBackend::Steps::native_allreduce(at::Tensor tensor, const c10d::ReduceOp& op) {
  if (alone()) return;
  Tensors tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = native_op(op);
  parts_.native->allreduce(tensors, options)->wait();
}

void MixedBackend::Steps::native_reduce(at::Tensor tensor, const c10d::ReduceOp& op, int root) {
  if (alone()) return;
  Tensors tensors{std::move(tensor)};
  c10d::ReduceOptions options;
  options.reduceOp = native_op(op);
  options.rootRank = root;
  parts_.native->reduce(tensors, options)->wait();
}

void MixedBackend::Steps::native_broadcast(at::Tensor tensor, int root) {
  if (alone()) return;
  Tensors tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  parts_.native->broadcast(tensors, options)->wait();
}

void MixedBackend::Steps::native_reduce_scatter(at::Tensor output, at::Tensor input,
                                                const c10d::ReduceOp& op) {
  if (alone()) {
    output.copy_(input.view_as(output));
    return;
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = native_op(op);
  parts_.native->_reduce_scatter_base(output, input, options)->wait();
}

void MixedBackend::Steps::native_allgather(at::Tensor output, at::Tensor input) {
  if (alone()) {
    output.view_as(input).copy_(input);
    return;
  }
  parts_.native->_allgather_base(output, input, {})->wait();
}

void MixedBackend::Steps::native_alltoall(at::Tensor output, at::Tensor input,
                                          std::vector<std::int64_t> output_splits,
                                          std::vector<std::int64_t> input_splits) {
  if (alone()) {
    output.copy_(input);
    return;
  }
  parts_.native->alltoall_base(output, input, output_splits, input_splits, {})->wait();
}

Staged MixedBackend::Steps::stage(const at::Tensor& tensor, Access access) const {
  return {tensor, parts_.strategy, access};
}

// The stream's clock goes in with the data and comes back with it.
template <class Operation>
void MixedBackend::Steps::cross(c10::Device where, Operation&& operation) {
  const Timeline timeline(where);
  call_.ready_at_ns = timeline.ready_at_ns();
  timeline.wait_until_ns(operation(call_));
}

void MixedBackend::Steps::cross_allreduce(at::Tensor shard, std::size_t begin, std::size_t count,
                                          const c10d::ReduceOp& op) {
  const Reduction how = reduction_of(shard, op);
  const Staged staged = stage(shard, Access::read_write);
  const std::size_t width = shard.element_size();
  std::vector<Slice> slices;
  for (const Range& range : common_slices(count, vendors.members)) {
    const bool mine = range.begin >= begin && range.begin < begin + staged.count();
    auto* data = static_cast<std::byte*>(staged.data()) + (mine ? range.begin - begin : 0) * width;
    slices.push_back({data, range.count * how.numbers_per_element, range.owners});
  }
  cross(staged.device(), [&](const Call& call) {
    return allreduce_slices(group_, slices, how.type, how.op, group_.size(), call);
  });
  staged.copy_back();
}

void MixedBackend::Steps::cross_allreduce_leaders(at::Tensor tensor,
                                                  const std::vector<int>& leaders,
                                                  const c10d::ReduceOp& op) {
  if (std::find(leaders.begin(), leaders.end(), group_.rank()) == leaders.end()) return;
  const Reduction how = reduction_of(tensor, op);
  const Staged staged = stage(tensor, Access::read_write);
  const Slice whole{staged.data(), staged.count() * how.numbers_per_element, leaders};
  cross(staged.device(), [&](const Call& call) {
    return allreduce_slices(group_, {&whole, 1}, how.type, how.op, group_.size(), call);
  });
  staged.copy_back();
}

void MixedBackend::Steps::cross_exchange(const std::vector<Row>& to, const std::vector<Row>& from) {
  std::vector<Staged> sources, targets;
  std::vector<ConstBlock> inputs(group_.size(), ConstBlock{nullptr, 0});
  std::vector<Block> outputs(group_.size(), Block{nullptr, 0});
  for (const Row& row : to) {
    sources.push_back(stage(row.tensor, Access::read));
    inputs[row.rank] = {sources.back().data(), sources.back().bytes()};
  }
  for (const Row& row : from) {
    targets.push_back(stage(row.tensor, Access::write));
    outputs[row.rank] = {targets.back().data(), targets.back().bytes()};
  }
  if (to.empty() && from.empty()) return;
  const c10::Device where = (to.empty() ? targets : sources).front().device();
  cross(where, [&](const Call& call) { return dicomm::alltoall(group_, inputs, outputs, call); });
  for (const Staged& target : targets) target.copy_back();
}

void MixedBackend::Steps::combine(const Tensors& rows, at::Tensor into, const c10d::ReduceOp& op) {
  const Reduction how = reduction_of(into, op);
  const Combine step(how.type, how.op);
  const Staged target = stage(into, Access::write);
  std::vector<Staged> staged;
  std::vector<const void*> sources;
  for (const at::Tensor& row : rows) {
    staged.push_back(stage(row, Access::read));
    sources.push_back(staged.back().data());
  }
  reduce_divided(sources, target.data(), target.count() * how.numbers_per_element, how.type,
                 step.op, how.op == ReduceOp::avg ? group_.size() : 1);
  target.copy_back();
}

std::int64_t MixedBackend::Steps::ready_at_ns() const {
  return timeline_.is_emulated() ? timeline_.ready_at_ns() : 0;
}

}  // namespace dicomm
