// The steps of one mixed-vendor collective on its communication stream.
#pragma once

#include "mixed.h"

namespace dicomm {

class MixedBackend::Steps {
 public:
  Steps(const Parts& parts, c10::Device device, Group& group, const Call& call);

  const Vendors& vendors;
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  // Native steps among the ranks of the own vendor, of contiguous tensors; the stream waits for
  // each. Nothing to do where a vendor has one rank. `root` counts within the vendor.
  void native_allreduce(at::Tensor tensor, const c10d::ReduceOp& op);
  void native_reduce(at::Tensor tensor, const c10d::ReduceOp& op, int root);
  void native_broadcast(at::Tensor tensor, int root);
  void native_reduce_scatter(at::Tensor output, at::Tensor input, const c10d::ReduceOp& op);
  void native_allgather(at::Tensor output, at::Tensor input);
  void native_alltoall(at::Tensor output, at::Tensor input, std::vector<std::int64_t> output_splits,
                       std::vector<std::int64_t> input_splits);

  // Steps of dicomm over the whole group. Tensors are flat and contiguous.
  // The vector's shard of this rank, at `begin` of `count` elements in all, summed up over vendors
  // on the finest slices that all vendors' shards have in common.
  void cross_allreduce(at::Tensor shard, std::size_t begin, std::size_t count,
                       const c10d::ReduceOp& op);
  // The same of whole vectors, between one leader a vendor, group ranks. Others do nothing.
  void cross_allreduce_leaders(at::Tensor tensor, const std::vector<int>& leaders,
                               const c10d::ReduceOp& op);
  // Tensors to and from other ranks.
  struct Row {
    int rank;
    at::Tensor tensor;
  };
  void cross_exchange(const std::vector<Row>& to, const std::vector<Row>& from);
  // into = rows[0] op rows[1] op ..., divided by the group's size for avg.
  void combine(const Tensors& rows, at::Tensor into, const c10d::ReduceOp& op);

  // When the stream is through, on an emulated chip's clock; 0 elsewhere.
  std::int64_t ready_at_ns() const;

 private:
  Staged stage(const at::Tensor& tensor, Access access) const;
  template <class Operation>
  void cross(c10::Device where, Operation&& operation);
  bool alone() const { return vendors.own_size() == 1; }

  const Parts& parts_;
  Timeline timeline_;
  Group& group_;
  Call call_;
};

// What native backends are asked for: averages are divided only once all is summed up.
c10d::ReduceOp native_op(const c10d::ReduceOp& op);

}  // namespace dicomm
