// Collectives over chips of several vendors: the vendor's own ("native") backend inside a vendor,
// dicomm between vendors.
//
// Each collective is one job of the group's queue, on the communication stream of the device. Its
// steps follow each other by stream order: a native step's work is waited for by that stream, a
// step of dicomm carries the stream's clock, and nobody synchronises a stream where the chip's
// clock can be read (elsewhere the host waits once, before bytes leave the chip). A vendor's ranks
// may be any ranks of the group, and vendors may have different numbers of them.
//
// Every rank ends with the same bits. 16-bit floats are rounded by the native backend inside each
// vendor and once more between vendors.
//
// Not composed, and all dicomm: messages, gather, scatter, barrier, lists of unequal tensors.
#pragma once

#include "backend.h"
#include "vendors.h"

namespace dicomm {

class MixedBackend final : public Backend {
 public:
  // native: a group of the own vendor's ranks in the order of the group; null where there is but
  // one.
  MixedBackend(c10::intrusive_ptr<c10d::Store> store, const dicomm::Options& options,
               Strategy strategy, const std::shared_ptr<Communicator>& shared_with,
               const std::vector<int>& ranks, const std::vector<int>& vendor_of,
               c10::intrusive_ptr<c10d::Backend> native);

  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;

 private:
  class Steps;

  // Jobs in the queue may outlive this backend: they share it.
  struct Parts {
    Vendors vendors;
    c10::intrusive_ptr<c10d::Backend> native;
    Strategy strategy;
  };

  template <class CallOptions>
  WorkPtr compose(c10d::OpType type, const char* title, const CallOptions& options, Tensors inputs,
                  Tensors results, std::function<void(Steps&)> body);

  std::shared_ptr<const Parts> parts_;
};

}  // namespace dicomm
