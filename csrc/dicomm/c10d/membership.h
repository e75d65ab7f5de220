// This process's place in one process group, shared by the backend and its works.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "collective/group.h"
#include "core/communicator.h"
#include "core/fork.h"
#include "ordered_queue.h"

namespace dicomm {

class Membership {
 public:
  // shared_with: a communicator whose connections this group's ranks use too, which are `ranks` of
  // it; null: they make their own.
  static std::shared_ptr<Membership> create(std::shared_ptr<Store> store, const Options& options,
                                            const std::shared_ptr<Communicator>& shared_with,
                                            const std::vector<int>& ranks);
  ~Membership() { leave(); }

  Communicator& communicator() { return *communicator_; }
  const std::shared_ptr<Communicator>& shared_communicator() const { return communicator_; }
  Group& group() { return group_; }
  // Throws DistBackendError in a forked child.
  void require_own_process() const;
  // Where the collectives wait that this thread starts: the group's queue, or that of the futures'
  // callbacks which this thread is in. Throws DistBackendError in a forked child.
  std::shared_ptr<OrderedQueue> collectives();
  const std::string& name() const { return name_; }

  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // What went wrong first, as torch.distributed asks for it.
  c10d::ErrorType error() const { return error_; }
  void set_error(c10d::ErrorType error) {
    auto none = c10d::ErrorType::SUCCESS;
    error_.compare_exchange_strong(none, error);
  }

  // Whether it failed, or is being left: nothing more can be done.
  bool has_ended() const { return leaving_ || !communicator_->failure().empty(); }
  void abort(const std::string& reason) { communicator_->abort(reason); }
  // A job whose ranks disagree is over: aborts every group of this process for the same reason,
  // so that ranks that share no group with the cause can name it too.
  static void abort_all(const std::string& reason);
  // The same, where another rank is the cause: its failure is passed on word for word.
  static void relay_to_all(const std::string& cause);
  // Keeps a send whose work was dropped before it was done, and the memory it reads, until it is.
  void keep(std::shared_ptr<Request> send, std::shared_ptr<void> memory);
  // Finishes what was started, then leaves in order.
  void shutdown();

 private:
  struct Kept {
    std::shared_ptr<void> memory;  // goes after the send
    std::shared_ptr<Request> send;
  };

  Membership(std::shared_ptr<Communicator> communicator, const Options& options);
  std::vector<Kept> take_kept();
  void close();
  void leave();

  const Origin origin_;
  std::shared_ptr<Communicator> communicator_;
  Group group_;
  std::string name_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<c10d::ErrorType> error_ = c10d::ErrorType::SUCCESS;
  std::atomic<bool> leaving_ = false;
  const std::shared_ptr<OrderedQueue> collectives_ = std::make_shared<OrderedQueue>();
  std::mutex kept_mutex_;
  std::vector<Kept> kept_;
};

// While it lives, this thread calls the callbacks of the future of one of the group's collectives.
// The collectives that they start have a queue of their own: a callback may wait for them, though
// its own collective still holds the group's queue. So they come before all that was called after
// that one, on every rank alike, whenever the ranks call what comes later.
class CallbackScope {
 public:
  explicit CallbackScope(const Membership& membership);
  ~CallbackScope();  // runs what the callbacks started and did not wait for
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  // The queue of the callbacks of that group that this thread is in; null: it is in none.
  static std::shared_ptr<OrderedQueue> queue_of(const Membership& membership);

 private:
  static thread_local CallbackScope* innermost_;

  const Membership& membership_;
  CallbackScope* const outer_;
  std::shared_ptr<OrderedQueue> queue_;  // made when it is first asked for
};

}  // namespace dicomm
