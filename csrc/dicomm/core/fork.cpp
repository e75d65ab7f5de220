#include "core/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace dicomm {

namespace fork_details {

unsigned forks = 0;

}  // namespace fork_details

namespace {

// Never destroyed: descriptors may outlive every static object.
struct Registry {
  std::mutex mutex;          // held across a fork
  std::vector<bool> listed;  // by descriptor
};

Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

void close_all_listed() {
  ++fork_details::forks;
  std::vector<bool>& listed = registry().listed;
  for (std::size_t fd = 0; fd < listed.size(); ++fd)
    if (listed[fd]) ::close(static_cast<int>(fd));
  listed.assign(listed.size(), false);
  registry().mutex.unlock();
}

[[maybe_unused]] const int watching_forks = ::pthread_atfork(
    [] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); }, close_all_listed);

}  // namespace

void close_in_children(int fd) {
  const std::lock_guard held(registry().mutex);
  auto& listed = registry().listed;
  if (listed.size() <= static_cast<std::size_t>(fd)) listed.resize(2 * fd + 1);
  listed[fd] = true;
}

// Under the mutex, so that no fork can come in between and no other thread be given the number.
void close_here(int fd) {
  const std::lock_guard held(registry().mutex);
  registry().listed[fd] = false;
  ::close(fd);
}

ClosedInChildren::ClosedInChildren(int fd) : fd_(fd) { close_in_children(fd); }

ClosedInChildren::~ClosedInChildren() {
  if (!origin_.is_here()) return;
  const std::lock_guard held(registry().mutex);
  registry().listed[fd_] = false;
}

}  // namespace dicomm
