#include "membership.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "device_memory.h"
#include "imported_memory.h"

namespace dicomm {

namespace {

std::mutex registry_mutex;

// Of communicators, not memberships: a worker thread that drops the last hold on its own membership
// would wait for itself. Never destroyed: worker threads may outlive static objects at exit.
std::vector<std::weak_ptr<Communicator>>& registry() {
  static auto* communicators = new std::vector<std::weak_ptr<Communicator>>;
  return *communicators;
}

std::vector<std::shared_ptr<Communicator>> all_communicators() {
  std::vector<std::shared_ptr<Communicator>> all;
  std::lock_guard lock(registry_mutex);
  for (const auto& communicator : registry())
    if (auto alive = communicator.lock()) all.push_back(std::move(alive));
  return all;
}

bool is_over(Request& request) {
  try {
    return request.test();
  } catch (const Error&) {
    return true;
  }
}

}  // namespace

std::shared_ptr<Membership> Membership::create(std::shared_ptr<Store> store, const Options& options,
                                               const std::shared_ptr<Communicator>& shared_with,
                                               const std::vector<int>& ranks) {
  auto communicator = shared_with ? shared_with->subgroup(std::move(store), options, ranks)
                                  : Communicator::create(std::move(store), options);
  // In a forked child nothing can be destroyed without the threads that only the parent has.
  std::shared_ptr<Membership> membership(new Membership(std::move(communicator), options),
                                         [](Membership* old) {
                                           if (old->origin_.is_here()) delete old;
                                         });
  std::lock_guard lock(registry_mutex);
  std::erase_if(registry(), [](const auto& other) { return other.expired(); });
  registry().push_back(membership->communicator_);
  share_device_memory(membership->communicator_);
  return membership;
}

Membership::Membership(std::shared_ptr<Communicator> communicator, const Options& options)
    : communicator_(std::move(communicator)),
      group_(communicator_, {}, 0, options.node),
      name_(options.name),
      timeout_(options.timeout) {}

void Membership::require_own_process() const {
  try {
    communicator_->require_own_process();
  } catch (const Error& error) {
    C10_THROW_ERROR(DistBackendError, "dicomm process group '" + name_ + "': " + error.what());
  }
}

std::shared_ptr<OrderedQueue> Membership::collectives() {
  require_own_process();
  auto of_callbacks = CallbackScope::queue_of(*this);
  return of_callbacks ? of_callbacks : collectives_;
}

void Membership::abort_all(const std::string& reason) {
  for (const auto& communicator : all_communicators()) communicator->abort(reason);
}

void Membership::relay_to_all(const std::string& cause) {
  for (const auto& communicator : all_communicators()) communicator->relay(cause);
}

// Under the mutex nothing is waited for and no memory let go of: both may take the interpreter's
// lock, which the next to come may hold.
void Membership::keep(std::shared_ptr<Request> send, std::shared_ptr<void> memory) {
  if (!origin_.is_here()) return;
  std::vector<Kept> over;
  std::lock_guard lock(kept_mutex_);
  const auto ended = std::partition(kept_.begin(), kept_.end(),
                                    [](const Kept& kept) { return !is_over(*kept.send); });
  over.assign(std::make_move_iterator(ended), std::make_move_iterator(kept_.end()));
  kept_.erase(ended, kept_.end());
  kept_.push_back({std::move(memory), std::move(send)});
}

std::vector<Membership::Kept> Membership::take_kept() {
  std::lock_guard lock(kept_mutex_);
  return std::exchange(kept_, {});
}

void Membership::shutdown() {
  if (!origin_.is_here()) return;
  collectives_->stop();
  for (auto kept = take_kept(); !kept.empty(); kept = take_kept())
    for (const Kept& one : kept) {
      try {
        one.send->wait(timeout());
      } catch (const Error&) {  // nobody asked for its outcome
      }
    }
  close();
}

// The peers' memory is theirs again.
void Membership::close() {
  communicator_->close();
  release_unused_imports(std::chrono::seconds(0));
}

// Closing first makes collectives that are still waiting fail at once.
void Membership::leave() {
  leaving_ = true;
  close();
  collectives_->stop();
}

thread_local CallbackScope* CallbackScope::innermost_ = nullptr;

CallbackScope::CallbackScope(const Membership& membership)
    : membership_(membership), outer_(std::exchange(innermost_, this)) {}

CallbackScope::~CallbackScope() {
  innermost_ = outer_;
  if (queue_) queue_->stop();
}

std::shared_ptr<OrderedQueue> CallbackScope::queue_of(const Membership& membership) {
  CallbackScope* scope = innermost_;
  while (scope && &scope->membership_ != &membership) scope = scope->outer_;
  if (!scope) return nullptr;
  if (!scope->queue_) scope->queue_ = std::make_shared<OrderedQueue>();
  return scope->queue_;
}

}  // namespace dicomm
