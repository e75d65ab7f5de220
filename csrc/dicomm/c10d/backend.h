// The torch.distributed backend "dicomm".
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "chip_reduction.h"
#include "message.h"
#include "work.h"

namespace dicomm {

class Backend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // The strategy applies to device tensors; host tensors are always used in place. shared_with: see
  // Membership.
  Backend(c10::intrusive_ptr<c10d::Store> store, const dicomm::Options& options, Strategy strategy,
          const std::shared_ptr<Communicator>& shared_with, const std::vector<int>& ranks);
  ~Backend() override;

  const std::string getBackendName() const override { return "dicomm"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  c10d::ErrorType getError() override;
  // How many collectives were called: TORCH_DISTRIBUTED_DEBUG=DETAIL compares it between ranks.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return collectives_called_; }

  const std::shared_ptr<Communicator>& communicator() const {
    return membership_->shared_communicator();
  }
  // Paces this rank's link to `peer`, a rank of the group, and counts the bytes sent over it.
  void set_link(int peer, double latency_s, double bytes_per_s);
  std::uint64_t bytes_sent(int peer) const;

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // Rank 0 names the ranks that did not come; all of them with wait_all_ranks, else the first.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 protected:
  WorkPtr track(WorkPtr work);
  void carry_clocks(c10::Device device);

  std::shared_ptr<Membership> membership_;
  std::uint64_t collectives_called_ = 0;

 private:
  Strategy staging() const;
  // on_chip: the tensors stay there. Else their bytes go to where the transport finds them.
  Staged stage(const at::Tensor& tensor, Access access, bool on_chip = false) const;
  std::vector<Staged> stage(const Tensors& tensors, Access access, bool on_chip = false) const;
  WorkPtr message(c10d::OpType type, const char* title, const at::Tensor& tensor, int peer,
                  int tag);
  struct Peer {
    Strategy strategy;
    std::string chip_memory_domain;
  };
  const Peer& peer_of(int peer);
  bool shares_chip_memory(const Peer& peer) const;
  MayReach reduces_on_chips(const Tensors& given);
  // inputs: shown in profiles; results: what the work's future holds; staged: what the operation
  // reads and writes.
  template <class CallOptions>
  WorkPtr launch(c10d::OpType type, const char* title, const CallOptions& options, Tensors inputs,
                 Tensors results, std::vector<Staged> staged, CollectiveWork::Operation operation);

  std::shared_ptr<Store> store_;
  Peer me_;                                 // as the others know this rank
  std::vector<std::optional<Peer>> peers_;  // as far as they are known
  const MayReach chips_may_reach_ = std::make_shared<std::atomic<bool>>(true);
  bool carries_clocks_ = false;
  std::optional<std::vector<WorkPtr>> coalescing_;
};

inline const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors,
                                     const char* operation) {
  TORCH_CHECK(tensors.size() == 1, "dicomm ", operation, ": one tensor expected, got ",
              tensors.size());
  return tensors.front();
}

}  // namespace dicomm
