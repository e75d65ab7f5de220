#include "collective/exchange.h"

#include <algorithm>
#include <string>

namespace dicomm {

namespace {

using Clock = std::chrono::steady_clock;

std::int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

}  // namespace

Exchange::Exchange(Group& group, const Call& call)
    : group_(group), tag_(call.tag), deadline_(Clock::now() + call.timeout) {}

Exchange::Incoming Exchange::receive(void* data, std::size_t bytes, int peer) {
  if (bytes == 0) return {};
  const int from = group_.communicator_rank(peer);
  return {group_.communicator().irecv(data, bytes, from, tag_), bytes, peer};
}

void Exchange::send(const void* data, std::size_t bytes, int peer, std::int64_t ready_at_ns) {
  if (bytes == 0) return;
  const int to = group_.communicator_rank(peer);
  const LinkPace pace = group_.communicator().link(to);
  if (pace.bytes_per_s > 0) {
    const std::int64_t ready = ready_at_ns > 0 ? ready_at_ns : now_ns();
    ready_at_ns = std::max(ready, port_free_at_ns_);
    port_free_at_ns_ = ready_at_ns + static_cast<std::int64_t>(bytes / pace.bytes_per_s * 1e9);
  }
  sends_.push_back(group_.communicator().isend(data, bytes, to, tag_, ready_at_ns));
}

Exchange::Incoming Exchange::receive_signal(int peer) {
  const int from = group_.communicator_rank(peer);
  return {group_.communicator().irecv(nullptr, 0, from, tag_), 0, peer};
}

void Exchange::send_signal(int peer, std::int64_t ready_at_ns) {
  const int to = group_.communicator_rank(peer);
  sends_.push_back(group_.communicator().isend(nullptr, 0, to, tag_, ready_at_ns));
}

std::int64_t Exchange::wait(const Incoming& incoming) {
  if (!incoming.request) return 0;
  const std::size_t bytes = incoming.request->wait(time_left());
  if (bytes != incoming.bytes)
    throw Error("group rank " + std::to_string(incoming.peer) + " sent " + std::to_string(bytes) +
                " bytes where " + std::to_string(incoming.bytes) +
                " were expected: the ranks disagree on the sizes of this collective");
  return incoming.request->delivered_at_ns();
}

std::int64_t Exchange::wait(std::span<const Incoming> incoming) {
  std::int64_t delivered_at_ns = 0;
  for (const Incoming& message : incoming)
    delivered_at_ns = std::max(delivered_at_ns, wait(message));
  return delivered_at_ns;
}

std::int64_t Exchange::finish() {
  for (const auto& request : sends_) request->wait(time_left());
  sends_.clear();
  return port_free_at_ns_;
}

std::chrono::milliseconds Exchange::time_left() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  return std::max(left, std::chrono::milliseconds(0));
}

}  // namespace dicomm
