// What a rank holds, action after action of a step; heteropp/cost/memory_walk.py says what for.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace planner {

// in the order of heteropp.schedule.action.Kind
enum ActionKind {
  kReceiveActivation,
  kGatherActivation,
  kForward,
  kSendActivation,
  kRecompute,
  kReceiveGradient,
  kGatherGradient,
  kBackward,
  kBackwardInput,
  kSendGradient,
  kBackwardWeight,
  kReduce,
  kSwitch,
  kStep,
};

using Coded = std::array<int, 3>;  // an action: its kind, micro-batch (0 where none) and ministage

struct MinistageBytes {  // of one rank; see heteropp.cost.memory_walk.Ministage
  std::int64_t flat, gradient, reduced, input, output, kept, forward_peak, backward_input_peak,
      backward_weight_peak, put_off, parts, update_peak, exchanged, to_self, staying,
      between_slices;
};

struct WalkedStage {
  // by ministage, then by slice of a micro-batch; one where sequences are whole
  std::vector<std::vector<MinistageBytes>> ministages;
  std::vector<int> following;     // by ministage: that of this rank which takes its output, or -1
  std::vector<Coded> ahead;       // kind of receive, ministage, and how many are posted ahead
  std::int64_t fixed_bytes;       // that nothing changes
  int gathers;                    // pieces that a boundary tensor comes in
  int dp, zero_stage, under_way;  // under_way: sends to one neighbour at once, at most
  bool keeps;                     // what a backward needs of its forward
  bool offload, in_place_update, overlap;
};

struct Held {  // bytes by what they are for, when most are held
  std::int64_t parameters = 0, gradients = 0, kept = 0, working = 0, recomputed = 0, boundary = 0;
};

struct WalkedBytes {
  std::int64_t before = 0;                  // a step
  std::vector<std::int64_t> during, after;  // by action: the most bytes, and those held then
  Held most;
  std::int64_t host = 0;  // the most bytes in host memory
};

WalkedBytes walk_memory(const WalkedStage& stage, const std::vector<Coded>& table);

}  // namespace planner
