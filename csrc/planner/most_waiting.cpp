#include "most_waiting.h"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <stdexcept>
#include <tuple>

namespace planner {

namespace {

struct Inbox {
  std::array<int, 3> name;       // stage, ministage and kind of its receive
  long receives = 0, sends = 0;  // in a step: where micro-batches are unlike, not as many
  long received = 0, sent = 0, most = 1;
};

int ideal_s(int kind) {
  if (kind == kBackward) return 2;
  return kind == kForward || kind == kBackwardInput || kind == kBackwardWeight;
}

bool is_send(int kind) { return kind == kSendActivation || kind == kSendGradient; }

}  // namespace

std::vector<Waiting> most_waiting(const std::vector<std::vector<Coded>>& tables,
                                  const std::vector<Between>& between) {
  std::map<std::array<int, 3>, long> count;
  for (std::size_t s = 0; s < tables.size(); ++s)
    for (auto [kind, i, k] : tables[s]) ++count[{static_cast<int>(s), k, kind}];
  std::vector<Inbox> inboxes;
  std::map<std::array<int, 3>, std::size_t> inbox_of;  // by stage, ministage and kind of either end
  auto join = [&](std::array<int, 3> send, std::array<int, 3> receive) {
    if (!count.count(receive)) return;
    inbox_of[send] = inbox_of[receive] = inboxes.size();
    inboxes.push_back({receive, count[receive], count[send]});
  };
  for (auto [s, k, t, j] : between) {
    join({s, k, kSendActivation}, {t, j, kReceiveActivation});
    join({t, j, kSendGradient}, {s, k, kReceiveGradient});
  }
  std::vector<std::size_t> at(tables.size(), 0);
  std::vector<bool> waits(tables.size(), false);
  // when each stage comes to its next action; of one moment's a send is the last
  using Coming = std::tuple<long, bool, int>;
  std::priority_queue<Coming, std::vector<Coming>, std::greater<>> coming;
  auto come = [&](int s, long when) {
    if (at[s] < tables[s].size()) coming.push({when, is_send(tables[s][at[s]][0]), s});
  };
  for (std::size_t s = 0; s < tables.size(); ++s) come(static_cast<int>(s), 0);
  while (!coming.empty()) {
    auto [now, last, s] = coming.top();
    coming.pop();
    auto [kind, i, k] = tables[s][at[s]];
    auto found = inbox_of.find({s, k, kind});
    Inbox* inbox = found == inbox_of.end() ? nullptr : &inboxes[found->second];
    if (inbox && !is_send(kind)) {
      // several sends make a tensor, or one several
      if (inbox->sent * inbox->receives / inbox->sends == inbox->received) {
        waits[s] = true;
        continue;
      }
      ++inbox->received;
    }
    ++at[s];
    if (inbox && is_send(kind)) {
      ++inbox->sent;
      long begun = (inbox->sent * inbox->receives + inbox->sends - 1) / inbox->sends;
      inbox->most = std::max(inbox->most, begun - inbox->received);
      int receiver = inbox->name[0];
      if (waits[receiver]) {
        waits[receiver] = false;
        come(receiver, now);
      }
    }
    come(s, now + ideal_s(kind));
  }
  for (std::size_t s = 0; s < tables.size(); ++s)
    if (at[s] < tables[s].size())
      throw std::runtime_error("a schedule in which stages wait for ever");
  std::vector<Waiting> result;
  for (const Inbox& one : inboxes)
    result.push_back({one.name[0], one.name[1], one.name[2], static_cast<int>(one.most)});
  return result;
}

}  // namespace planner
