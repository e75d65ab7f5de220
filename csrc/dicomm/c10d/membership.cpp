#include "membership.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "device_memory.h"

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

std::shared_ptr<Membership> Membership::create(std::shared_ptr<Store> store,
                                               const Options& options) {
  std::shared_ptr<Membership> membership(
      new Membership(Communicator::create(std::move(store), options), options));
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

void Membership::abort_all(const std::string& reason) {
  for (const auto& communicator : all_communicators()) communicator->abort(reason);
}

void Membership::relay_to_all(const std::string& cause) {
  for (const auto& communicator : all_communicators()) communicator->relay(cause);
}

void Membership::keep(std::shared_ptr<Request> send, std::shared_ptr<void> memory) {
  std::lock_guard lock(kept_mutex_);
  std::erase_if(kept_, [](const auto& other) { return is_over(*other.second); });
  kept_.emplace_back(std::move(memory), std::move(send));
}

void Membership::shutdown() {
  collectives_.stop();
  std::lock_guard lock(kept_mutex_);
  for (auto& [memory, send] : kept_) {
    try {
      send->wait(timeout());
    } catch (const Error&) {  // nobody asked for its outcome
    }
  }
  kept_.clear();
  communicator_->close();
}

// Closing first makes collectives that are still waiting fail at once.
void Membership::leave() {
  communicator_->close();
  collectives_.stop();
}

}  // namespace dicomm
