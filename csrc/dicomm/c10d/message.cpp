#include "message.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include "core/clock.h"
#include "errors.h"
#include "imported_memory.h"

namespace dicomm {

namespace {

std::optional<std::vector<at::Tensor>> shown_in_profiles(const Staged& buffer) {
  if (!at::hasCallbacks()) return std::nullopt;
  return {{buffer.tensor()}};
}

}  // namespace

bool MessageWork::in_chunks(const at::Tensor& tensor, Strategy mine, Strategy peers) {
  return tensor.nbytes() > 2 * kChunkBytes &&
         (mine == Strategy::cpu_mediated || peers == Strategy::cpu_mediated);
}

MessageWork::MessageWork(std::shared_ptr<Membership> membership, c10d::OpType type,
                         const char* title, std::shared_ptr<Staged> buffer,
                         std::shared_ptr<ChipTensor> chip, int peer, std::uint64_t tag,
                         bool chunked)
    : Work(-1, type, at::hasCallbacks() ? title : nullptr, shown_in_profiles(*buffer)),
      membership_(std::move(membership)),
      buffer_(std::move(buffer)),
      chip_(std::move(chip)),
      timeline_(buffer_->device()),
      peer_(peer),
      tag_(tag),
      chunks_(chunked ? (buffer_->bytes() + kChunkBytes - 1) / kChunkBytes : 1) {}

// A send is under way whether or not its work is kept; a dropped receive is cancelled.
MessageWork::~MessageWork() {
  if (!is_send() || completed_) return;
  for (std::size_t chunk = arrived_; chunk < requests_.size(); ++chunk)
    membership_->keep(std::move(requests_[chunk]), buffer_);
}

std::size_t MessageWork::length(std::size_t chunk) const {
  if (chunks_ == 1) return buffer_->bytes();
  return std::min(kChunkBytes, buffer_->bytes() - begin(chunk));
}

std::byte* MessageWork::data(std::size_t chunk) const {
  return static_cast<std::byte*>(buffer_->data()) + begin(chunk);
}

void MessageWork::start() {
  called_ = StreamMark::here_behind_the_host(buffer_->tensor().device());
  is_send() ? start_send() : start_receive();
}

// A chip that has yet to compute the bytes, or to copy them, holds up the message and not the host.
void MessageWork::start_send() {
  Communicator& communicator = membership_->communicator();
  if (chip_) {
    requests_.push_back(communicator.isend(chip_, buffer_->bytes(), peer_, tag_, called_.work()));
    return;
  }
  const std::int64_t ready_at_ns = timeline_.is_emulated() ? timeline_.ready_at_ns() : 0;
  for (std::size_t chunk = 0; chunk < chunks_; ++chunk) {
    buffer_->copy_in(begin(chunk), length(chunk), called_);
    requests_.push_back(communicator.isend(data(chunk), length(chunk), peer_, tag_, ready_at_ns,
                                           buffer_->there().work()));
  }
}

void MessageWork::start_receive() {
  if (chip_) {
    requests_.push_back(membership_->communicator().irecv(chip_, buffer_->bytes(), peer_, tag_));
    return;
  }
  for (std::size_t chunk = 0; chunk < chunks_; ++chunk) receive(chunk, peer_);
}

void MessageWork::receive(std::size_t chunk, int peer) {
  // The transport writes to host memory, or where the chip's earlier work still may.
  auto after = buffer_->device().is_cpu() ? nullptr : called_.work();
  requests_.push_back(
      membership_->communicator().irecv(data(chunk), length(chunk), peer, tag_, std::move(after)));
}

bool MessageWork::isCompleted() {
  std::lock_guard lock(mutex_);
  if (completed_) return delivered_.is_reached();
  try {
    while (arrived_ < chunks_) {
      Request& request = *requests_[arrived_];
      if (!request.test() || !Timeline::has_come(request.delivered_at_ns())) return false;
      arrived(arrived_);
    }
    complete();
  } catch (const std::exception& error) {
    complete(translate(error, *membership_, operation()));
  }
  return delivered_.is_reached();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  if (!completed_) {
    if (timeout == kNoTimeout) timeout = membership_->timeout();
    const auto deadline = deadline_after(timeout);
    try {
      while (arrived_ < chunks_) {
        const auto left =
            arrived_ == 0 ? timeout
                          : std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        requests_[arrived_]->wait(std::max(left, std::chrono::milliseconds(0)));
        arrived(arrived_);
      }
      complete();
    } catch (const TimeoutError& error) {  // still in flight: may be waited for again
      std::rethrow_exception(translate(error, *membership_, operation()));
    } catch (const std::exception& error) {
      complete(translate(error, *membership_, operation()));
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  delivered_.hold_current_stream();
  return true;
}

// A chunk's bytes are in place; now the clocks.
void MessageWork::arrived(std::size_t chunk) {
  Request& request = *requests_[chunk];
  // A host may reuse what it sent at once. A chip may not: its link reads chip memory until then.
  if (!is_send() || timeline_.is_emulated()) timeline_.wait_until_ns(request.delivered_at_ns());
  if (!is_send()) {
    // Of bytes staged on the host, the chip's clock learns that its host waited for them.
    Timeline(buffer_->tensor().device()).wait_until_ns(request.delivered_at_ns());
    const std::size_t received = request.wait();
    if (received != length(chunk)) post_rest_from_any_source(received);
    if (chip_ && chip_->copied())
      delivered_ = *chip_->copied();
    else
      copy_back(chunk);
  }
  ++arrived_;
}

void MessageWork::copy_back(std::size_t chunk) {
  if (!buffer_->must_copy_back()) return;
  const c10::Device chip = buffer_->tensor().device();
  std::optional<c10::StreamGuard> guard;
  if (works_behind_the_host(chip)) guard.emplace(communication_stream(chip));
  called_.hold_current_stream();
  buffer_->copy_back(begin(chunk), length(chunk));
  if (guard) delivered_ = StreamMark::here(chip);
}

// Whether a sender nobody named cuts its message is known once the first chunk is here.
void MessageWork::post_rest_from_any_source(std::size_t received) {
  const bool chunk_of_more = peer_ == Communicator::any_source && chunks_ == 1 &&
                             received == kChunkBytes && buffer_->bytes() > 2 * kChunkBytes;
  if (!chunk_of_more)
    throw Error("received " + std::to_string(received) + " bytes into a tensor of " +
                std::to_string(length(arrived_)) + " bytes");
  chunks_ = (buffer_->bytes() + kChunkBytes - 1) / kChunkBytes;
  for (std::size_t chunk = 1; chunk < chunks_; ++chunk) receive(chunk, requests_[0]->peer());
}

void MessageWork::complete(std::exception_ptr failure) {
  exception_ = std::move(failure);
  completed_ = true;
  if (chip_ && !is_send()) release_unused_imports();
  if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  TORCH_CHECK(false, "dicomm: a ", operation(), " has no future, only collectives have; wait() for",
              " its work");
}

void MessageWork::abort() { membership_->abort("a message was aborted by its rank"); }

}  // namespace dicomm
