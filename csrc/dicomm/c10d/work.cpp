#include "work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <unordered_map>

namespace dicomm {

namespace {

// Where a collective's results become visible: a stream of its own, so that a chip's compute
// streams wait only when a work is waited for.
c10::Stream communication_stream(c10::Device device) {
  static std::mutex mutex;
  static std::unordered_map<c10::Device, c10::Stream> streams;
  std::lock_guard lock(mutex);
  const c10::impl::VirtualGuardImpl guard(device.type());
  auto found = streams.find(device);
  if (found == streams.end())
    found = streams.emplace(device, guard.getStreamFromGlobalPool(device)).first;
  return found->second;
}

}  // namespace

std::exception_ptr translate(const std::exception& error, Membership& membership,
                             const std::string& operation) {
  std::string text = error.what();
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error))
    text = torch_error->what_without_backtrace();
  if (dynamic_cast<const PeerError*>(&error)) {
    const std::string cause = membership.communicator().failure();
    cause.empty() ? Membership::abort_all(text) : Membership::relay_to_all(cause);
  }
  try {
    C10_THROW_ERROR(DistBackendError,
                    operation + " (process group '" + membership.name() + "'): " + text);
  } catch (...) {
    return std::current_exception();
  }
}

MessageWork::MessageWork(std::shared_ptr<Membership> membership, c10d::OpType type, Staged buffer,
                         std::shared_ptr<Request> request)
    : Work(-1, type),
      membership_(std::move(membership)),
      buffer_(std::move(buffer)),
      timeline_(buffer_.device()),
      request_(std::move(request)) {}

// A send is under way whether or not its work is kept; a dropped receive is cancelled.
MessageWork::~MessageWork() {
  if (is_send() && !completed_)
    membership_->keep(std::move(request_), std::make_shared<Staged>(std::move(buffer_)));
}

bool MessageWork::isCompleted() {
  std::lock_guard lock(mutex_);
  if (completed_) return true;
  try {
    if (!request_->test() || !Timeline::has_come(request_->delivered_at_ns())) return false;
    complete();
  } catch (const std::exception& error) {
    fail(error);
  }
  return true;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  std::lock_guard lock(mutex_);
  if (!completed_) {
    try {
      request_->wait(timeout == kNoTimeout ? membership_->timeout() : timeout);
      complete();
    } catch (const TimeoutError& error) {  // still in flight: may be waited for again
      std::rethrow_exception(translate(error, *membership_, is_send() ? "send" : "recv"));
    } catch (const std::exception& error) {
      fail(error);
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

// The bytes are in place; now the clocks.
void MessageWork::complete() {
  // A host may reuse what it sent at once. A chip may not: its link reads chip memory until then.
  if (!is_send() || timeline_.is_emulated()) timeline_.wait_until_ns(request_->delivered_at_ns());
  if (!is_send()) {
    const std::size_t received = request_->wait();
    if (received != buffer_.bytes())
      throw Error("received " + std::to_string(received) + " bytes into a tensor of " +
                  std::to_string(buffer_.bytes()) + " bytes");
    buffer_.copy_back();
  }
  completed_ = true;
}

void MessageWork::fail(const std::exception& error) {
  exception_ = translate(error, *membership_, is_send() ? "send" : "recv");
  completed_ = true;
}

void MessageWork::abort() { membership_->abort("a message was aborted by its rank"); }

CollectiveWork::CollectiveWork(const std::shared_ptr<Membership>& membership, Parts parts)
    : Work(-1, parts.type, parts.title, parts.results),
      membership_(membership),
      parts_(std::move(parts)),
      device_timeline_(parts_.device),
      transfer_timeline_(parts_.staged_on_host ? c10::Device(c10::kCPU) : parts_.device),
      call_{membership->group().next_tag(), transfer_timeline_.ready_at_ns(), parts_.timeout},
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          parts_.device.is_cpu() ? std::vector<c10::Device>{}
                                 : std::vector<c10::Device>{parts_.device})) {}

c10::intrusive_ptr<CollectiveWork> CollectiveWork::enqueue(
    const std::shared_ptr<Membership>& membership, Parts parts, bool overlap) {
  auto work = c10::make_intrusive<CollectiveWork>(membership, std::move(parts));
  work->number_ =
      membership->collectives().submit([work, member = membership.get()] { work->run(*member); });
  if (overlap) membership->collectives().hand_over();
  return work;
}

void CollectiveWork::run(Membership& membership) {
  std::exception_ptr failure;
  try {
    deliver(parts_.operation(membership.group(), call_));
  } catch (const std::exception& error) {
    failure = translate(error, membership, parts_.title);
    // Ranks may now disagree on what was done: nothing can follow.
    Membership::abort_all(std::string(parts_.title) + ": " + error.what());
  }
  parts_.operation = nullptr;  // lets go of the inputs
  finish(failure);
  if (failure) future_->setErrorIfNeeded(failure);
}

// The bytes are in place; the results become visible at done_at_ns.
void CollectiveWork::deliver(std::int64_t done_at_ns) {
  std::optional<c10::StreamGuard> guard;
  if (!parts_.device.is_cpu()) guard.emplace(communication_stream(parts_.device));
  transfer_timeline_.wait_until_ns(done_at_ns);
  done_at_ns_ = done_at_ns;
  if (!parts_.outputs.empty()) {
    for (const Staged& output : parts_.outputs) output.copy_back();
    done_at_ns_ = device_timeline_.ready_at_ns();
  }
  future_->markCompleted(c10::IValue(parts_.results));
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) {
    const auto membership = membership_.lock();
    TORCH_CHECK(membership, parts_.title, ": its process group is gone");
    if (timeout == kNoTimeout) {
      membership->collectives().run_until(number_);
    } else {
      membership->collectives().hand_over();
      if (!membership->collectives().wait_for(number_, timeout))
        std::rethrow_exception(
            translate(TimeoutError("not done after " + std::to_string(timeout.count()) + " ms"),
                      *membership, parts_.title));
    }
  }
  if (const auto failure = exception()) std::rethrow_exception(failure);
  device_timeline_.wait_until_ns(done_at_ns_);
  return true;
}

// A future completes although nobody waits for its work.
c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  if (const auto membership = membership_.lock()) membership->collectives().hand_over();
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

}  // namespace dicomm
