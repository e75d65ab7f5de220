#include "collective/exchange.h"

#include <algorithm>
#include <string>

#include "core/clock.h"

namespace dicomm {

namespace {

// A deadline of seconds needs no better clock.
Clock::time_point rough_now() {
  return Clock::time_point(std::chrono::nanoseconds(rough_now_ns()));
}

}  // namespace

Exchange::Exchange(Group& group, const Call& call)
    : group_(group),
      tag_(call.tag),
      deadline_(deadline_after(call.timeout, rough_now())),
      rank_(group.rank()),
      size_(group.size()),
      port_(own_port_) {}

Exchange::Exchange(Exchange& whole, const std::vector<int>& members)
    : group_(whole.group_),
      tag_(whole.tag_),
      deadline_(whole.deadline_),
      rank_(static_cast<int>(std::find(members.begin(), members.end(), whole.rank_) -
                             members.begin())),
      size_(static_cast<int>(members.size())),
      members_(members),
      port_(whole.port_) {
  if (!whole.members_.empty())
    for (int& member : members_) member = whole.members_[member];
}

int Exchange::communicator_rank(int peer) const {
  return group_.communicator_rank(members_.empty() ? peer : members_[peer]);
}

Exchange::Incoming Exchange::receive(void* data, std::size_t bytes, int peer) {
  return bytes == 0 ? Incoming() : post_receive(data, bytes, peer);
}

void Exchange::send(const void* data, std::size_t bytes, int peer, std::int64_t ready_at_ns) {
  if (bytes == 0) return;
  const int to = communicator_rank(peer);
  const LinkPace pace = group_.communicator().link(to);
  if (pace.bytes_per_s > 0) {
    const std::int64_t ready = ready_at_ns > 0 ? ready_at_ns : now_ns();
    ready_at_ns = std::max(ready, port_.free_at_ns);
    port_.free_at_ns = ready_at_ns + static_cast<std::int64_t>(bytes / pace.bytes_per_s * 1e9);
  }
  post_send(data, bytes, to, ready_at_ns);
}

Exchange::Incoming Exchange::receive_signal(int peer) { return post_receive(nullptr, 0, peer); }

void Exchange::send_signal(int peer, std::int64_t ready_at_ns) {
  post_send(nullptr, 0, communicator_rank(peer), ready_at_ns);
}

Exchange::Incoming Exchange::post_receive(void* data, std::size_t bytes, int peer) {
  RequestState& request = port_.requests.add(false, data, bytes, communicator_rank(peer), tag_);
  group_.communicator().start(request, 0);
  return {&request, bytes, peer};
}

void Exchange::post_send(const void* data, std::size_t bytes, int communicator_rank,
                         std::int64_t ready_at_ns) {
  RequestState& request =
      port_.requests.add(true, const_cast<void*>(data), bytes, communicator_rank, tag_);
  group_.communicator().start(request, ready_at_ns);
}

// What is done needs no deadline, which would have to be looked up on the clock.
std::size_t Exchange::wait(RequestState& request) const {
  return request.wait(request.finished() ? std::chrono::milliseconds(0) : time_left());
}

std::int64_t Exchange::wait(const Incoming& incoming) {
  if (!incoming.request) return 0;
  const std::size_t bytes = wait(*incoming.request);
  if (bytes != incoming.bytes)
    throw Error(
        "group rank " + std::to_string(members_.empty() ? incoming.peer : members_[incoming.peer]) +
        " sent " + std::to_string(bytes) + " bytes where " + std::to_string(incoming.bytes) +
        " were expected: the ranks disagree on the sizes of this collective");
  return incoming.request->delivered_at_ns();
}

void Exchange::look_for(std::span<const Incoming> incoming) {
  for (const Incoming& message : incoming)
    if (message.request) message.request->test();
}

std::int64_t Exchange::wait(std::span<const Incoming> incoming) {
  std::int64_t delivered_at_ns = 0;
  for (const Incoming& message : incoming)
    delivered_at_ns = std::max(delivered_at_ns, wait(message));
  return delivered_at_ns;
}

std::int64_t Exchange::finish() {
  for (; port_.sent < port_.requests.size(); ++port_.sent) {
    RequestState& request = port_.requests[port_.sent];
    if (request.is_send) wait(request);
  }
  return port_.free_at_ns;
}

std::chrono::milliseconds Exchange::time_left() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - rough_now());
  return std::max(left, std::chrono::milliseconds(0));
}

}  // namespace dicomm
