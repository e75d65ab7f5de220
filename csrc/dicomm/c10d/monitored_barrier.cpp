// The barrier that says who did not come.
#include <string>

#include "backend.h"
#include "core/clock.h"
#include "errors.h"

namespace dicomm {

namespace {

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// The ranks that said nothing to rank 0 in time.
std::vector<int> missing_ranks(Communicator& communicator, std::uint64_t tag,
                               std::chrono::milliseconds timeout, bool all) {
  const auto deadline = deadline_after(timeout);
  std::vector<std::shared_ptr<Request>> signals;
  for (int peer = 1; peer < communicator.world_size(); ++peer)
    signals.push_back(communicator.irecv(nullptr, 0, peer, tag));
  std::vector<int> missing;
  for (const auto& signal : signals) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    try {
      signal->wait(std::max(left, std::chrono::milliseconds(0)));
    } catch (const TimeoutError&) {
      missing.push_back(signal->peer());
      if (!all) break;
    }
  }
  return missing;
}

}  // namespace

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto timeout =
      options.timeout == c10d::kUnsetTimeout ? membership_->timeout() : options.timeout;
  ++collectives_called_;
  membership_->collectives()->run_all();  // nothing of before may be met by what follows
  const std::uint64_t tag = membership_->group().next_tag();
  Communicator& communicator = membership_->communicator();
  try {
    if (rank_ != 0) {
      const auto arrival = communicator.isend(nullptr, 0, 0, tag);
      const auto release = communicator.irecv(nullptr, 0, 0, tag);
      arrival->wait(timeout);
      release->wait(2 * timeout);  // rank 0 may come last, and then wait for others
      return;
    }
    const auto missing = missing_ranks(communicator, tag, timeout, wait_all_ranks);
    if (!missing.empty()) {
      const std::string text = listed(missing) + " did not reach monitored_barrier within " +
                               std::to_string(timeout.count()) + " ms";
      Membership::abort_all(text);
      throw Error(text);
    }
    std::vector<std::shared_ptr<Request>> releases;
    for (int peer = 1; peer < size_; ++peer)
      releases.push_back(communicator.isend(nullptr, 0, peer, tag));
    for (const auto& release : releases) release->wait(timeout);
  } catch (const Error& error) {
    std::rethrow_exception(translate(error, *membership_, "monitored_barrier"));
  }
}

}  // namespace dicomm
