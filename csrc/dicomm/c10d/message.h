// Sends and receives in flight, as torch.distributed sees them.
#pragma once

#include <c10/util/SmallVector.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "chip_tensor.h"
#include "membership.h"
#include "staging.h"
#include "streams.h"
#include "timeline.h"

namespace dicomm {

// One send or receive. The transport runs by itself; waiting happens on the caller's thread. Nobody
// waits for a chip that has yet to compute what is sent: its streams say when the message can go.
//
// A large tensor goes in chunks where a side is CPU-mediated: while one is on the wire, the next is
// copied from the chip and the one before to the chip. Each chunk is a message of the same tag;
// both sides cut alike (see in_chunks), a tensor of the host too, as the other side's may be a
// chip's. It goes whole between chips that share memory: one copies it from the other's.
class MessageWork : public c10d::Work {
 public:
  static constexpr std::size_t kChunkBytes = 1 << 20;
  static bool in_chunks(const at::Tensor& tensor, Strategy mine, Strategy peers);

  // chip: null, or the buffer, staged on demand.
  MessageWork(std::shared_ptr<Membership> membership, c10d::OpType type, const char* title,
              std::shared_ptr<Staged> buffer, std::shared_ptr<ChipTensor> chip, int peer,
              std::uint64_t tag, bool chunked);
  ~MessageWork() override;
  // Hands the message to the transport. Throws dicomm's errors.
  void start();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override;
  int sourceRank() const override { return requests_.front()->peer(); }
  std::vector<at::Tensor> result() override { return {}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  bool is_send() const { return opType_ == c10d::OpType::SEND; }
  const char* operation() const { return is_send() ? "send" : "recv"; }
  std::size_t begin(std::size_t chunk) const { return chunk * kChunkBytes; }
  std::size_t length(std::size_t chunk) const;
  std::byte* data(std::size_t chunk) const;
  void start_send();
  void start_receive();
  void receive(std::size_t chunk, int peer);
  void arrived(std::size_t chunk);
  void copy_back(std::size_t chunk);
  void post_rest_from_any_source(std::size_t received);
  void complete(std::exception_ptr failure = nullptr);

  std::shared_ptr<Membership> membership_;
  std::shared_ptr<Staged> buffer_;
  std::shared_ptr<ChipTensor> chip_;
  Timeline timeline_;
  int peer_;
  std::uint64_t tag_;
  std::size_t chunks_;
  std::size_t arrived_ = 0;  // chunks that are done
  c10::SmallVector<std::shared_ptr<Request>, 1> requests_;
  // What the caller's stream was given before the call computes what is sent, and may still use
  // the tensor that is received. Of a receive that is copied to a chip: when it is.
  StreamMark called_;
  StreamMark delivered_;
};

}  // namespace dicomm
