// Plays tables of actions on given seconds, event by event; heteropp/simulator/engine.py says how.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace planner {

enum OpCode { kWork, kSend, kReceive, kMark };

using Op = std::array<int, 3>;  // one of OpCode, its slot, and the micro-batch of a message

struct Hop {
  int pipe;
  double seconds;  // that the message fills the pipe
};

struct Transmission {
  int receiver;  // actor
  int inbox;     // of the receiver
  double latency_s;
  std::vector<Hop> pipes;
};

struct Ops {
  std::vector<Op> table;
};

struct Boxes {
  std::vector<std::vector<Transmission>> outboxes;
  std::vector<int> messages;  // that come to each inbox, of one micro-batch
};

struct Actor {
  std::shared_ptr<const Ops> ops;  // plays of one search share these, and boxes
  std::vector<double> seconds;
  std::vector<double> factors;  // of the seconds of each work in turn; empty: all 1
  std::shared_ptr<const Boxes> boxes;
  double begin_s = 0;
};

struct Played {
  std::vector<std::vector<double>> starts, ends;  // by actor and op
  std::vector<double> message_s;                  // by actor
  std::vector<int> next;                          // op of each actor: where it is stuck, or the end
  std::map<int, std::vector<int>> blocked;        // actors stuck in a send, and those it waits for
};

// slack: sends of an outbox that may wait for their receives; none: any number.
// hold: a send holds its actor until its messages have arrived.
Played play(const std::vector<Actor>& actors, std::optional<int> slack, bool hold);

}  // namespace planner
