#include "work.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "core/clock.h"
#include "errors.h"

namespace dicomm {

CollectiveWork::CollectiveWork(const std::shared_ptr<Membership>& membership,
                               const std::shared_ptr<OrderedQueue>& queue, Parts parts)
    : Work(-1, parts.type, at::hasCallbacks() ? parts.title : nullptr, parts.inputs),
      membership_(membership),
      queue_(queue),
      parts_(std::move(parts)),
      device_timeline_(parts_.device),
      transfer_timeline_(parts_.staged_on_host ? c10::Device(c10::kCPU) : parts_.device),
      call_{0, transfer_timeline_.is_emulated() ? transfer_timeline_.ready_at_ns() : 0,
            parts_.timeout},
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          parts_.device.is_cpu() ? std::vector<c10::Device>{}
                                 : std::vector<c10::Device>{parts_.device})) {}

c10::intrusive_ptr<CollectiveWork> CollectiveWork::enqueue(
    const std::shared_ptr<Membership>& membership, Parts parts, bool overlap) {
  const auto queue = membership->collectives();
  auto work = c10::make_intrusive<CollectiveWork>(membership, queue, std::move(parts));
  work->number_ = queue->submit([work, member = membership.get()] { work->run(*member); });
  if (overlap) queue->hand_over();
  return work;
}

// The ranks run their collectives in the same order, but may call one while another's callbacks
// call others: so the tag is taken here.
void CollectiveWork::run(Membership& membership) {
  call_.tag = membership.group().next_tag();
  try {
    const bool there = await_inputs(membership);
    const std::int64_t done_at_ns = parts_.operation(membership.group(), call_);
    if (!there) throw AbortedError("its group ended before this rank's chip got there");
    parts_.operation = nullptr;  // lets go of the inputs
    deliver(membership, done_at_ns);
  } catch (const std::exception& error) {
    const auto failure = translate(error, membership, parts_.title);
    // Ranks may now disagree on what was done: nothing can follow.
    Membership::abort_all(std::string(parts_.title) + ": " + error.what());
    parts_.operation = nullptr;
    delivered_ = end_of_communication();
    finish(failure);
    const CallbackScope callbacks(membership);
    future_->setErrorIfNeeded(failure);
  }
}

// Behind what a failed operation left its chip to do, which may still write to the results.
StreamMark CollectiveWork::end_of_communication() const noexcept {
  try {
    if (works_behind_the_host(parts_.device))
      return StreamMark::of(communication_stream(parts_.device));
  } catch (const std::exception&) {  // the chip failed, and does nothing more
  }
  return {};
}

// False: its group has ended meanwhile, which the operation will say, as none is left to talk to.
bool CollectiveWork::await_inputs(Membership& membership) const {
  const auto deadline = deadline_after(call_.timeout);
  const auto has_ended = [&] { return membership.has_ended(); };
  return std::all_of(parts_.there.begin(), parts_.there.end(), [&](const StreamMark& there) {
    return there.wait(deadline - Clock::now(), "not begun", has_ended);
  });
}

// The bytes are in place; the results become visible at done_at_ns.
void CollectiveWork::deliver(const Membership& membership, std::int64_t done_at_ns) {
  std::optional<c10::StreamGuard> guard;
  if (!parts_.device.is_cpu()) guard.emplace(communication_stream(parts_.device));
  transfer_timeline_.wait_until_ns(done_at_ns);
  if (parts_.staged_on_host) device_timeline_.wait_until_ns(done_at_ns);  // as its host has
  done_at_ns_ = done_at_ns;
  if (!parts_.outputs.empty()) {
    parts_.called.hold_current_stream();
    for (const Staged& output : parts_.outputs) output.copy_back();
    if (device_timeline_.is_emulated()) done_at_ns_ = device_timeline_.ready_at_ns();
  }
  delivered_ = StreamMark::here_behind_the_host(parts_.device);
  finish();  // before the future: its callbacks may ask the work
  const CallbackScope callbacks(membership);
  future_->markCompleted(c10::IValue(parts_.results));
}

bool CollectiveWork::isCompleted() {
  return Work::isCompleted() && (exception() || delivered_.is_reached());
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!Work::isCompleted()) {
    const auto membership = membership_.lock();
    TORCH_CHECK(membership, parts_.title, ": its process group is gone");
    membership->require_own_process();
    const auto queue = queue_.lock();  // null: it is done meanwhile
    if (queue && timeout == kNoTimeout) {
      queue->run_until(number_);
    } else if (queue) {
      queue->hand_over();
      if (!queue->wait_for(number_, timeout))
        std::rethrow_exception(translate(
            TimeoutError("the wait: not done after " + std::to_string(timeout.count()) + " ms"),
            *membership, parts_.title));
    }
  }
  if (const auto failure = exception()) {
    try {
      delivered_.hold_current_stream();
    } catch (const std::exception&) {  // the chip failed, too
    }
    std::rethrow_exception(failure);
  }
  device_timeline_.wait_until_ns(done_at_ns_);
  if (!parts_.device.is_cpu() && !device_timeline_.is_emulated())
    future_->wait();  // done; makes this stream wait for the communication stream
  return true;
}

// A future completes although nobody waits for its work.
c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  if (const auto membership = membership_.lock()) membership->require_own_process();
  if (const auto queue = queue_.lock()) queue->hand_over();
  return future_;
}

void CollectiveWork::abort() {
  if (const auto membership = membership_.lock())
    membership->abort(std::string(parts_.title) + " was aborted by its rank");
}

bool BatchWork::isCompleted() {
  bool all = true;
  for (const auto& work : works_) all = work->isCompleted() && all;
  return all;
}

bool BatchWork::isSuccess() const { return !exception(); }

std::exception_ptr BatchWork::exception() const {
  for (const auto& work : works_)
    if (auto failure = work->exception()) return failure;
  return nullptr;
}

bool BatchWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

void BatchWork::abort() {
  for (const auto& work : works_) work->abort();
}

std::vector<at::Tensor> BatchWork::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_) {
    const auto result = work->result();
    results.insert(results.end(), result.begin(), result.end());
  }
  return results;
}

// Its value is result(), like a single collective's.
c10::intrusive_ptr<c10::ivalue::Future> BatchWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  const auto tensors = result();
  return c10::collectAll(futures)->then(
      [tensors](c10::ivalue::Future& all) {
        all.value();  // throws what went wrong
        return c10::IValue(tensors);
      },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace dicomm
