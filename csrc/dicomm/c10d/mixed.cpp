#include "mixed.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <numeric>

#include "elements.h"
#include "mixed_steps.h"

namespace dicomm {

namespace {

using c10d::OpType;
using Tensors = Backend::Tensors;

// Up to here a reduction goes through one leader a vendor: fewer and shorter steps.
constexpr std::size_t kLeaderBytes = 16 << 10;

// A flat, contiguous view of the tensor, or copy.
at::Tensor flat(const at::Tensor& tensor) { return tensor.contiguous().view({-1}); }

void write_back(const at::Tensor& result, at::Tensor tensor) {
  if (!result.is_same(tensor) && result.data_ptr() != tensor.data_ptr())
    tensor.copy_(result.view(tensor.sizes()));
}

// The longest list's length.
std::int64_t most(const std::vector<std::vector<int>>& lists) {
  std::size_t length = 0;
  for (const auto& list : lists) length = std::max(length, list.size());
  return static_cast<std::int64_t>(length);
}

// Row counts dealt out to the ranks: as given, or even.
std::vector<std::int64_t> row_counts(const std::vector<std::int64_t>& splits, std::int64_t rows,
                                     int size) {
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "dicomm all_to_all_single: ", rows,
                      " rows do not divide evenly over ", size, " ranks");
    return std::vector<std::int64_t>(size, rows / size);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size) &&
                        std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) == rows,
                    "dicomm all_to_all_single: ", size, " split sizes that sum to ", rows,
                    " rows expected");
  return splits;
}

}  // namespace

MixedBackend::MixedBackend(c10::intrusive_ptr<c10d::Store> store, const dicomm::Options& options,
                           Strategy strategy, const std::shared_ptr<Communicator>& shared_with,
                           const std::vector<int>& ranks, const std::vector<int>& vendor_of,
                           c10::intrusive_ptr<c10d::Backend> native)
    : Backend(std::move(store), options, strategy, shared_with, ranks) {
  TORCH_CHECK_VALUE(vendor_of.size() == static_cast<std::size_t>(options.world_size),
                    "dicomm: ", vendor_of.size(), " vendors named for a group of ",
                    options.world_size, " ranks");
  const Vendors vendors(vendor_of, options.rank);
  TORCH_CHECK_VALUE(native || vendors.own_size() == 1, "dicomm: rank ", options.rank,
                    " has no native backend for the ", vendors.own_size(), " ranks of its vendor");
  TORCH_CHECK_VALUE(
      !native || (native->getSize() == vendors.own_size() && native->getRank() == vendors.index),
      "dicomm: rank ", options.rank, " is number ", vendors.index, " of ", vendors.own_size(),
      " of its vendor, but not in its native group");
  parts_ = std::make_shared<const Parts>(Parts{vendors, std::move(native), strategy});
}

void MixedBackend::abort() {
  Backend::abort();
  if (!parts_->native) return;
  try {
    parts_->native->abort();
  } catch (const c10::Error&) {  // not every backend can
  }
}

void MixedBackend::shutdown() {
  Backend::shutdown();
  if (!parts_->native) return;
  try {
    parts_->native->shutdown();
  } catch (const c10::Error&) {  // not every backend can
  }
}

template <class CallOptions>
Backend::WorkPtr MixedBackend::compose(OpType type, const char* title, const CallOptions& options,
                                       Tensors inputs, Tensors results,
                                       std::function<void(Steps&)> body) {
  const c10::Device device = results.front().device();
  const Timeline timeline(device);
  carry_clocks(device);
  ++collectives_called_;
  const auto timeout =
      options.timeout == c10d::kUnsetTimeout ? membership_->timeout() : options.timeout;
  auto operation = [parts = parts_, device, body = std::move(body), inputs, results,
                    called = StreamMark::here(device)](Group& group, const Call& call) {
    const at::NoGradGuard no_grad;
    std::optional<c10::StreamGuard> guard;
    if (!device.is_cpu()) guard.emplace(communication_stream(device));
    called.hold_current_stream();
    for (const at::Tensor& tensor : inputs) keep_for_current_stream(tensor);
    for (const at::Tensor& tensor : results) keep_for_current_stream(tensor);
    Steps steps(*parts, device, group, call);
    body(steps);
    return steps.ready_at_ns();
  };
  // The mark orders the inputs, so that the stream need not be waited for here.
  const bool no_clock = !timeline.is_emulated();
  CollectiveWork::Parts parts{.type = type,
                              .title = title,
                              .device = device,
                              .staged_on_host = no_clock,
                              .inputs = inputs,
                              .results = results,
                              .there = {},
                              .outputs = {},
                              .called = {},
                              .operation = std::move(operation),
                              .timeout = timeout};
  return track(CollectiveWork::enqueue(membership_, std::move(parts), options.asyncOp));
}

// Large: each vendor reduce-scatters, ranks that hold the same slices sum them up over vendors,
// each vendor gathers. Small: through leaders.
Backend::WorkPtr MixedBackend::allreduce_coalesced(Tensors& tensors,
                                                   const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "dicomm all_reduce: no tensors");
  for (const at::Tensor& tensor : tensors) reduction_of(tensor, options.reduceOp);
  std::int64_t multiple = 1;
  for (const auto& members : parts_->vendors.members)
    multiple = std::lcm(multiple, static_cast<std::int64_t>(members.size()));
  const auto one = [op = options.reduceOp, multiple](Steps& steps, const at::Tensor& tensor) {
    const Vendors& vendors = steps.vendors;
    if (tensor.numel() == 0) return;
    at::Tensor data = flat(tensor);
    if (data.nbytes() <= kLeaderBytes) {
      std::vector<int> leaders;
      for (const auto& members : vendors.members) leaders.push_back(members.front());
      steps.native_allreduce(data, op);
      steps.cross_allreduce_leaders(data, leaders, op);
      steps.native_broadcast(data, 0);
      return write_back(data, tensor);
    }
    const std::int64_t count = data.numel();
    const std::int64_t padded = (count + multiple - 1) / multiple * multiple;
    at::Tensor whole = data;
    if (padded != count) {
      whole = at::empty({padded}, data.options());
      whole.narrow(0, 0, count).copy_(data);
      whole.narrow(0, count, padded - count).zero_();
    }
    const std::int64_t length = padded / vendors.own_size();
    at::Tensor shard = at::empty({length}, data.options());
    steps.native_reduce_scatter(shard, whole, op);
    steps.cross_allreduce(shard, vendors.index * length, padded, op);
    steps.native_allgather(whole, shard);
    if (padded != count) data.copy_(whole.narrow(0, 0, count));
    write_back(data, tensor);
  };
  const OpType type = tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED;
  return compose(type, "dicomm:all_reduce", options, tensors, tensors,
                 [tensors, one](Steps& steps) {
                   for (const at::Tensor& tensor : tensors) one(steps, tensor);
                 });
}

Backend::WorkPtr MixedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only_tensor(tensors, "all_reduce");
  c10d::AllreduceCoalescedOptions coalesced;
  static_cast<c10d::AllreduceOptions&>(coalesced) = options;
  return allreduce_coalesced(tensors, coalesced);
}

// From the root to a leader of every other vendor, then on inside each.
Backend::WorkPtr MixedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  return compose(OpType::BROADCAST, "dicomm:broadcast", options, tensors, tensors,
                 [=](Steps& steps) {
                   const Vendors& vendors = steps.vendors;
                   const at::Tensor data = flat(tensor);
                   const int leader = vendors.counterpart(root, vendors.mine);
                   std::vector<Steps::Row> to, from;
                   for (int vendor = 0; vendor < vendors.count() && steps.rank() == root; ++vendor)
                     if (vendor != vendors.mine)
                       to.push_back({vendors.counterpart(root, vendor), data});
                   if (steps.rank() == leader && leader != root) from.push_back({root, data});
                   steps.cross_exchange(to, from);
                   steps.native_broadcast(data, vendors.place(leader));
                   if (steps.rank() != root) write_back(data, tensor);
                 });
}

Backend::WorkPtr MixedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  reduction_of(tensor, options.reduceOp);
  const int root = static_cast<int>(options.rootRank);
  const auto op = options.reduceOp;
  return compose(OpType::REDUCE, "dicomm:reduce", options, tensors, tensors, [=](Steps& steps) {
    const Vendors& vendors = steps.vendors;
    // Native backends may use up what is not the root's: that is a copy.
    at::Tensor data = flat(tensor);
    if (data.data_ptr() == tensor.data_ptr()) data = data.clone();
    std::vector<int> leaders;
    for (int vendor = 0; vendor < vendors.count(); ++vendor)
      leaders.push_back(vendors.counterpart(root, vendor));
    steps.native_reduce(data, op, vendors.place(leaders[vendors.mine]));
    steps.cross_allreduce_leaders(data, leaders, op);
    if (steps.rank() == root) write_back(data, tensor);
  });
}

// Every block crosses once to each other vendor, to the rank that stands for its owner there; then
// each vendor gathers what its ranks hold, as many rows from each.
Backend::WorkPtr MixedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "dicomm all_gather_into_tensor: one output for every input expected");
  for (std::size_t i = 0; i < inputs.size(); ++i)
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_ &&
                          outputs[i].scalar_type() == inputs[i].scalar_type(),
                      "dicomm all_gather_into_tensor: ", outputs[i].numel(), " elements are not ",
                      size_, " times ", inputs[i].numel());
  const auto one = [](Steps& steps, const at::Tensor& input, const at::Tensor& output) {
    const at::Tensor block = flat(input);
    const Vendors& vendors = steps.vendors;
    const auto held = vendors.represented();
    const std::int64_t rows = most(held);
    const at::Tensor mine = at::empty({rows, block.numel()}, block.options());
    std::vector<Steps::Row> to, from;
    for (int vendor = 0; vendor < vendors.count(); ++vendor)
      if (vendor != vendors.mine) to.push_back({vendors.counterpart(steps.rank(), vendor), block});
    const auto& here = held[vendors.index];
    for (std::size_t row = 0; row < here.size(); ++row) {
      const at::Tensor place = mine[static_cast<std::int64_t>(row)];
      if (here[row] == steps.rank())
        place.copy_(block);
      else
        from.push_back({here[row], place});
    }
    steps.cross_exchange(to, from);
    const at::Tensor all = at::empty({vendors.own_size() * rows, block.numel()}, block.options());
    steps.native_allgather(all, mine);
    at::Tensor target =
        output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
    const at::Tensor by_rank = target.view({steps.size(), -1});
    for (int member = 0; member < vendors.own_size(); ++member)
      for (std::size_t row = 0; row < held[member].size(); ++row)
        by_rank[held[member][row]].copy_(all[member * rows + static_cast<std::int64_t>(row)]);
    write_back(target, output);
  };
  return compose(OpType::_ALLGATHER_BASE, "dicomm:all_gather_into_tensor", options, inputs, outputs,
                 [=](Steps& steps) {
                   for (std::size_t i = 0; i < inputs.size(); ++i)
                     one(steps, inputs[i], outputs[i]);
                 });
}

Backend::WorkPtr MixedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

// The mirror image of an allgather: partial sums of a block meet at the rank that stands for its
// owner, and cross from there.
Backend::WorkPtr MixedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(),
                    "dicomm reduce_scatter_tensor: one output for every input expected");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_ &&
                          outputs[i].scalar_type() == inputs[i].scalar_type(),
                      "dicomm reduce_scatter_tensor: ", inputs[i].numel(), " elements are not ",
                      size_, " times ", outputs[i].numel());
    reduction_of(outputs[i], options.reduceOp);
  }
  const auto op = options.reduceOp;
  const auto one = [op](Steps& steps, const at::Tensor& input, const at::Tensor& output) {
    const at::Tensor by_rank = input.contiguous().view({steps.size(), -1});
    const Vendors& vendors = steps.vendors;
    const auto held = vendors.represented();
    const std::int64_t rows = most(held);
    const std::int64_t length = by_rank.size(1);
    const at::Tensor all = at::empty({vendors.own_size() * rows, length}, by_rank.options());
    for (int member = 0; member < vendors.own_size(); ++member)
      for (std::int64_t row = 0; row < rows; ++row) {
        const at::Tensor place = all[member * rows + row];
        if (row < static_cast<std::int64_t>(held[member].size()))
          place.copy_(by_rank[held[member][row]]);
        else
          place.zero_();
      }
    const at::Tensor mine = at::empty({rows, length}, by_rank.options());
    steps.native_reduce_scatter(mine, all, op);
    std::vector<Steps::Row> to, from;
    Tensors partials(vendors.count());
    const auto& here = held[vendors.index];
    for (std::size_t row = 0; row < here.size(); ++row) {
      const at::Tensor partial = mine[static_cast<std::int64_t>(row)];
      if (here[row] == steps.rank())
        partials[vendors.mine] = partial;
      else
        to.push_back({here[row], partial});
    }
    for (int vendor = 0; vendor < vendors.count(); ++vendor)
      if (vendor != vendors.mine) {
        partials[vendor] = at::empty({length}, by_rank.options());
        from.push_back({vendors.counterpart(steps.rank(), vendor), partials[vendor]});
      }
    steps.cross_exchange(to, from);
    const at::Tensor result =
        output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
    steps.combine(partials, result, op);
    write_back(result, output);
  };
  return compose(OpType::_REDUCE_SCATTER_BASE, "dicomm:reduce_scatter_tensor", options, inputs,
                 outputs, [=](Steps& steps) {
                   for (std::size_t i = 0; i < inputs.size(); ++i)
                     one(steps, inputs[i], outputs[i]);
                 });
}

Backend::WorkPtr MixedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

// Inside a vendor by the native backend, between vendors by dicomm.
Backend::WorkPtr MixedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                             std::vector<std::int64_t>& output_splits,
                                             std::vector<std::int64_t>& input_splits,
                                             const c10d::AllToAllOptions& options) {
  const auto rows = [](const at::Tensor& tensor) { return tensor.dim() == 0 ? 1 : tensor.size(0); };
  TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type(),
                    "dicomm all_to_all_single: input and output must be of one type");
  const auto sent = row_counts(input_splits, rows(input), size_);
  const auto received = row_counts(output_splits, rows(output), size_);
  const auto body = [=, input = input, output = output](Steps& steps) {
    const Vendors& vendors = steps.vendors;
    const at::Tensor source = input.contiguous();
    const at::Tensor target =
        output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
    std::vector<Steps::Row> to, from;
    std::vector<at::Tensor> own_to, own_from;
    std::vector<std::int64_t> own_sent, own_received;
    std::int64_t next_sent = 0, next_received = 0;
    for (int rank = 0; rank < steps.size(); ++rank) {
      const at::Tensor there = source.narrow(0, next_sent, sent[rank]);
      const at::Tensor here = target.narrow(0, next_received, received[rank]);
      next_sent += sent[rank];
      next_received += received[rank];
      if (vendors.vendor_of[rank] == vendors.mine) {
        own_to.push_back(there);
        own_from.push_back(here);
        own_sent.push_back(sent[rank]);
        own_received.push_back(received[rank]);
      } else {
        to.push_back({rank, there});
        from.push_back({rank, here});
      }
    }
    const at::Tensor packed = at::cat(own_to);
    const auto own_rows =
        std::accumulate(own_received.begin(), own_received.end(), std::int64_t{0});
    const at::Tensor turned = target.new_empty(target.narrow(0, 0, own_rows).sizes());
    steps.native_alltoall(turned, packed, own_received, own_sent);
    std::int64_t next = 0;
    for (std::size_t i = 0; i < own_from.size(); next += own_received[i++])
      own_from[i].copy_(turned.narrow(0, next, own_received[i]));
    steps.cross_exchange(to, from);
    write_back(target, output);
  };
  return compose(OpType::ALLTOALL_BASE, "dicomm:all_to_all_single", options, {input}, {output},
                 body);
}

}  // namespace dicomm
