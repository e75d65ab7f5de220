#include "engine.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <queue>
#include <set>
#include <utility>

namespace planner {

namespace {

constexpr int kNobody = -1;

struct Flight {  // a message under way
  const Transmission* delivery;
  int micro_batch;
  int sender;  // whom it holds
  double sent_s;
  double end_s;         // when the pipes it has entered have let it pass
  std::size_t hop = 0;  // the pipe to enter next
};

struct Event {
  enum Kind { kRun, kSendAll, kSendOne, kFly };
  double time_s;
  long number;  // keeps equal times in order
  Kind kind;
  int actor;   // that runs or sends
  int outbox;  // of it, which is sent
  Flight flight;

  bool operator>(const Event& other) const {
    return time_s != other.time_s ? time_s > other.time_s : number > other.number;
  }
};

struct Unmatched {  // a send that waits for its receive
  int sender, outbox;
  const Transmission* delivery;
};

struct WaitingSender {
  std::size_t under_way;
  double latest_s;
};

class Engine {
 public:
  Engine(const std::vector<Actor>& actors, std::optional<int> slack, bool hold)
      : actors_(actors), slack_(slack), hold_(hold) {
    std::size_t count = actors.size();
    int last = 0, pipes = 0;
    for (const Actor& actor : actors) {
      for (const Op& op : actor.ops->table) last = std::max(last, op[2]);
      for (const auto& outbox : actor.boxes->outboxes)
        for (const Transmission& one : outbox)
          for (const Hop& hop : one.pipes) pipes = std::max(pipes, hop.pipe + 1);
    }
    micro_batches_ = last + 1;
    pipe_free_s_.assign(pipes, 0.0);
    played_.starts.resize(count);
    played_.ends.resize(count);
    played_.message_s.assign(count, 0.0);
    played_.next.assign(count, 0);
    works_.assign(count, 0);
    awaited_.assign(count, kNobody);
    held_.resize(count);
    posted_.resize(count);
    unmatched_.resize(count);
    outstanding_.resize(count);
    blocked_.assign(count, kNobody);
    for (std::size_t a = 0; a < count; ++a) {
      const Actor& actor = actors[a];
      clock_.push_back(actor.begin_s);
      runnable_.push_back(static_cast<int>(a));
      std::vector<int> left;
      for (int messages : actor.boxes->messages) left.insert(left.end(), micro_batches_, messages);
      arrival_s_.emplace_back(left.size(), 0.0);
      sent_s_.emplace_back(left.size(), 0.0);
      left_.push_back(std::move(left));
      played_.starts[a].reserve(actor.ops->table.size());
      played_.ends[a].reserve(actor.ops->table.size());
      outstanding_[a].resize(actor.boxes->outboxes.size());
    }
  }

  Played run() {
    while (!runnable_.empty() || !events_.empty()) {
      while (!runnable_.empty()) {
        int a = runnable_.front();
        runnable_.pop_front();
        advance(a);
      }
      if (!events_.empty()) {
        Event event = events_.top();
        events_.pop();
        now_ = event.time_s;
        happen(event);
      }
    }
    for (std::size_t a = 0; a < actors_.size(); ++a)
      if (blocked_[a] != kNobody)
        played_.blocked[static_cast<int>(a)] = outstanding_[a][blocked_[a]];
    return std::move(played_);
  }

 private:
  void happen(Event& event) {
    switch (event.kind) {
      case Event::kRun:
        runnable_.push_back(event.actor);
        break;
      case Event::kSendAll: {
        const auto& outbox = actors_[event.actor].boxes->outboxes[event.outbox];
        int sender = hold_ ? event.actor : kNobody;
        if (hold_) held_[event.actor] = {outbox.size(), now_};
        for (const Transmission& one : outbox)
          fly({&one, event.flight.micro_batch, sender, now_, now_});
        break;
      }
      case Event::kSendOne:
        fly({event.flight.delivery, event.flight.micro_batch, kNobody, now_, now_});
        break;
      case Event::kFly:
        fly(event.flight);
        break;
    }
  }

  // Runs an actor's ops until one has to wait.
  void advance(int a) {
    const Actor& actor = actors_[a];
    double now = clock_[a];
    std::size_t i = played_.next[a];
    while (i < actor.ops->table.size()) {
      auto [code, slot, micro_batch] = actor.ops->table[i];
      // with slack, who waits for whom depends on what is known when
      if (slack_ && now > now_ && (code == kSend || code == kReceive)) {
        at(now, Event::kRun, a);
        break;
      }
      std::optional<double> end = now;
      if (code == kWork) {
        double seconds = actor.seconds[slot];
        end = now + (actor.factors.empty() ? seconds : seconds * actor.factors[works_[a]++]);
      } else if (code == kReceive) {
        end = receive(a, slot * micro_batches_ + micro_batch, now);
      } else if (code == kSend && !slack_) {
        at(now, Event::kSendAll, a, slot, {nullptr, micro_batch, kNobody, 0, 0});
        if (hold_ && !actor.boxes->outboxes[slot].empty()) end.reset();
      } else if (code == kSend) {
        end = offer(a, slot, micro_batch, now);
      }
      if (!end) break;
      played_.starts[a].push_back(now);
      played_.ends[a].push_back(*end);
      now = *end;
      ++i;
    }
    clock_[a] = now;
    played_.next[a] = static_cast<int>(i);
  }

  // Ends the op that an actor waits in.
  void complete(int a, double end_s) {
    played_.starts[a].push_back(clock_[a]);
    played_.ends[a].push_back(end_s);
    clock_[a] = end_s;
    ++played_.next[a];
    runnable_.push_back(a);
  }

  void at(double time_s, Event::Kind kind, int actor, int outbox = 0, Flight flight = {}) {
    events_.push({time_s, ++number_, kind, actor, outbox, flight});
  }

  // Moves a message into its pipes up to the first busy one, and on once that serves it.
  void fly(Flight flight) {
    const auto& pipes = flight.delivery->pipes;
    while (flight.hop < pipes.size()) {
      auto [pipe, seconds] = pipes[flight.hop];
      double begin = std::max(pipe_free_s_[pipe], now_);
      double until = begin + seconds;
      pipe_free_s_[pipe] = until;
      flight.end_s = std::max(flight.end_s, until);
      ++flight.hop;
      if (begin > now_ && flight.hop < pipes.size()) {
        at(begin, Event::kFly, kNobody, 0, flight);
        return;
      }
    }
    arrive(flight);
  }

  void arrive(const Flight& flight) {
    int a = flight.delivery->receiver;
    double end_s = flight.end_s + flight.delivery->latency_s;
    int key = flight.delivery->inbox * micro_batches_ + flight.micro_batch;
    if (end_s >= arrival_s_[a][key]) {
      arrival_s_[a][key] = end_s;
      sent_s_[a][key] = flight.sent_s;
    }
    --left_[a][key];
    if (awaited_[a] == key && left_[a][key] == 0) {
      awaited_[a] = kNobody;
      runnable_.push_back(a);
    }
    if (flight.sender == kNobody) return;
    WaitingSender& held = held_[flight.sender];
    held.latest_s = std::max(held.latest_s, end_s);
    if (--held.under_way == 0) complete(flight.sender, held.latest_s);
  }

  std::optional<double> receive(int a, int key, double now) {
    if (slack_ && !posted_[a].count(key)) post(a, key, now);
    if (left_[a][key] > 0) {
      awaited_[a] = key;
      return std::nullopt;
    }
    double arrival_s = arrival_s_[a][key];
    if (arrival_s <= now) return now;
    played_.message_s[a] += arrival_s - std::max(now, sent_s_[a][key]);
    return arrival_s;
  }

  // Sends the messages whose receives are posted; the others wait for theirs.
  // Returns when the send ends, or none where too many wait and the sender does too.
  std::optional<double> offer(int a, int outbox, int micro_batch, double now) {
    for (const Transmission& one : actors_[a].boxes->outboxes[outbox]) {
      int key = one.inbox * micro_batches_ + micro_batch;
      if (posted_[one.receiver].count(key)) {
        at(now, Event::kSendOne, a, outbox, {&one, micro_batch, kNobody, 0, 0});
      } else {
        unmatched_[one.receiver][key].push_back({a, outbox, &one});
        outstanding_[a][outbox].push_back(one.receiver);
      }
    }
    if (!too_many(a, outbox)) return now;
    blocked_[a] = outbox;
    return std::nullopt;
  }

  void post(int a, int key, double now) {
    posted_[a].insert(key);
    auto found = unmatched_[a].find(key);
    if (found == unmatched_[a].end()) return;
    std::vector<Unmatched> waiting = std::move(found->second);
    unmatched_[a].erase(found);
    for (auto [sender, outbox, delivery] : waiting) {
      at(now, Event::kSendOne, sender, outbox, {delivery, key % micro_batches_, kNobody, 0, 0});
      auto& receivers = outstanding_[sender][outbox];
      receivers.erase(std::find(receivers.begin(), receivers.end(), a));
      if (blocked_[sender] == outbox && !too_many(sender, outbox)) {
        blocked_[sender] = kNobody;
        complete(sender, now);
      }
    }
  }

  bool too_many(int a, int outbox) const {
    return outstanding_[a][outbox].size() >
           static_cast<std::size_t>(*slack_) * actors_[a].boxes->outboxes[outbox].size();
  }

  const std::vector<Actor>& actors_;
  std::optional<int> slack_;
  bool hold_;
  int micro_batches_ = 1;
  Played played_;
  std::vector<double> clock_;
  std::vector<std::size_t> works_;  // by actor: done so far
  std::deque<int> runnable_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  long number_ = 0;
  double now_ = -std::numeric_limits<double>::infinity();  // of the last event
  std::vector<double> pipe_free_s_;
  // by actor and key, inbox x micro-batches + micro-batch: messages still to come, the last one's
  // arrival, and when it was sent
  std::vector<std::vector<int>> left_;
  std::vector<std::vector<double>> arrival_s_, sent_s_;
  std::vector<int> awaited_;  // by actor: the key it waits for
  std::vector<WaitingSender> held_;
  // with slack: receives that are posted, and the sends that wait for theirs
  std::vector<std::set<int>> posted_;
  std::vector<std::map<int, std::vector<Unmatched>>> unmatched_;
  std::vector<std::vector<std::vector<int>>> outstanding_;  // by actor and outbox: receivers
  std::vector<int> blocked_;                                // the outbox of a send that waits
};

}  // namespace

Played play(const std::vector<Actor>& actors, std::optional<int> slack, bool hold) {
  return Engine(actors, slack, hold).run();
}

}  // namespace planner
