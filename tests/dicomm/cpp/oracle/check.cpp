// The model. For each channel, the messages in the order of sending and the receives in the order
// of posting are laid side by side: message i meets receive i, but for what cancelling leaves open.
#include <cstring>
#include <vector>

#include "core/text.h"
#include "oracle/rank.h"
#include "support.h"

namespace dicomm::oracle {

namespace {

struct Sides {
  std::vector<const SendRecord*> sends;
  std::vector<const ReceiveRecord*> receives;
};

Sides sides(const Plan&, const Arena& arena, const Channel& channel) {
  Sides result;
  const RankLog& sender = arena.ranks[channel.from];
  for (std::uint32_t i = 0; i < sender.sends; ++i) {
    const SendRecord& send = sender.send[i];
    if (send.communicator == channel.communicator && send.to == channel.to &&
        send.tag == channel.tag)
      result.sends.push_back(&send);
  }
  const RankLog& receiver = arena.ranks[channel.to];
  for (std::uint32_t i = 0; i < receiver.receives; ++i) {
    const ReceiveRecord& receive = receiver.receive[i];
    if (receive.communicator != channel.communicator || receive.tag != channel.tag) continue;
    // A cancelled receive from any source may have swallowed a message of any channel, or none.
    const bool concerns =
        receive.from == channel.from ||
        (receive.from == Communicator::any_source && receive.outcome == Received::dropped);
    if (concerns) result.receives.push_back(&receive);
  }
  return result;
}

bool is_end(const ReceiveRecord& receive) {
  return (receive.has_sequence && receive.sequence == kEndSequence) ||
         (receive.outcome == Received::truncated && receive.bytes == kEndBytes);
}

// Whether this receive can have got this message.
bool agree(const Plan& plan, const Channel& channel, const SendRecord& send,
           const ReceiveRecord& receive) {
  const std::size_t bytes = plan.message_bytes(channel, send.sequence);
  switch (receive.outcome) {
    case Received::delivered: {
      if (receive.has_sequence) return receive.sequence == send.sequence;
      std::byte expected[8];
      testing::fill(expected, bytes < 8 ? bytes : 0, plan.message_key(channel, send.sequence));
      return receive.bytes == bytes && std::memcmp(expected, receive.short_contents, bytes) == 0;
    }
    case Received::truncated:
      return receive.bytes == bytes;
    case Received::taken_back:
      return send.cancelled;
    case Received::dropped:
      return true;
    case Received::pending:
    case Received::surplus:
      return false;
  }
  return false;
}

void check_channel(const Plan& plan, const Arena& arena, const Channel& channel) {
  const Sides both = sides(plan, arena, channel);
  // possible[n]: the receives so far can have got exactly the first n messages, in order.
  std::vector<bool> possible(both.sends.size() + 1, false);
  possible[0] = true;
  const auto skip_cancelled = [&] {
    for (std::size_t n = 0; n < both.sends.size(); ++n)
      if (possible[n] && both.sends[n]->cancelled) possible[n + 1] = true;
  };
  const auto fail = [&](const std::string& what) {
    throw Violation(text("communicator ", channel.communicator, ", rank ", channel.from,
                         " to rank ", channel.to, ", tag ", plan.tag_value(channel.tag), ": ", what,
                         " (", both.sends.size(), " sent, ", both.receives.size(), " receives)"));
  };
  bool ended = false;
  for (std::size_t i = 0; i < both.receives.size(); ++i) {
    const ReceiveRecord& receive = *both.receives[i];
    skip_cancelled();
    if (is_end(receive)) {
      if (!possible.back()) fail(text("messages were lost: receive ", i, " got the last one"));
      ended = true;
      continue;
    }
    if (receive.outcome == Received::surplus) continue;
    std::vector<bool> next(possible.size(), false);
    bool any = false;
    for (std::size_t n = 0; n < possible.size(); ++n) {
      if (!possible[n]) continue;
      if (receive.outcome == Received::dropped) next[n] = any = true;
      if (n < both.sends.size() && agree(plan, channel, *both.sends[n], receive))
        next[n + 1] = any = true;
    }
    if (!any)
      fail(text("receive ", i, " (outcome ", static_cast<int>(receive.outcome), ", ", receive.bytes,
                " bytes, message ", receive.sequence,
                ") is out of order, or twice, or never sent"));
    possible = std::move(next);
  }
  if (!ended) fail("the last message never came");
}

}  // namespace

void check_channels(const Plan& plan, const Arena& arena, int rank) {
  for (int communicator = 0; communicator < kCommunicators; ++communicator)
    for (int from = 0; from < plan.settings.ranks; ++from)
      for (int tag = 0; from != rank && tag < kTags; ++tag)
        check_channel(plan, arena, {communicator, from, rank, tag});
}

}  // namespace dicomm::oracle
