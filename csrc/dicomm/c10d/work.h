// Collectives and batches in flight, as torch.distributed sees them.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "membership.h"
#include "staging.h"
#include "streams.h"
#include "timeline.h"

namespace dicomm {

// One collective: a job of the group's queue, or of that of the callback which started it.
class CollectiveWork : public c10d::Work {
 public:
  using Operation = std::function<std::int64_t(Group&, const Call&)>;

  struct Parts {
    c10d::OpType type;
    const char* title;   // in profiles and errors, e.g. "dicomm:all_reduce"
    c10::Device device;  // the tensors'
    bool staged_on_host;
    std::vector<at::Tensor> inputs;  // for profiles
    std::vector<at::Tensor> results;
    std::vector<StreamMark> there;  // when what the operation reads is where it finds it
    std::vector<Staged> outputs;
    // The caller's stream at the call: what it was given before may still use the outputs.
    StreamMark called;
    Operation operation;
    std::chrono::milliseconds timeout;
  };

  CollectiveWork(const std::shared_ptr<Membership>& membership,
                 const std::shared_ptr<OrderedQueue>& queue, Parts parts);

  // Puts the work in the queue; overlap: let the worker thread run it.
  static c10::intrusive_ptr<CollectiveWork> enqueue(const std::shared_ptr<Membership>& membership,
                                                    Parts parts, bool overlap);

  // Whether the results can be read, on any stream.
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override;
  std::uint64_t getSequencenumber() const override { return number_; }
  std::vector<at::Tensor> result() override { return parts_.results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void run(Membership& membership);
  bool await_inputs(Membership& membership) const;
  StreamMark end_of_communication() const noexcept;
  void deliver(const Membership& membership, std::int64_t done_at_ns);

  std::weak_ptr<Membership> membership_;
  std::weak_ptr<OrderedQueue> queue_;  // it holds this work until that is done
  std::uint64_t number_ = 0;           // in the queue
  Parts parts_;
  Timeline device_timeline_;
  Timeline transfer_timeline_;
  Call call_;
  std::int64_t done_at_ns_ = 0;
  // Of a chip without an emulated clock: where the results are, or where it stopped that failed.
  StreamMark delivered_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several works that are waited for as one (batch_isend_irecv, coalescing).
class BatchWork : public c10d::Work {
 public:
  explicit BatchWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override;
  // Of collectives only: messages have none.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace dicomm
