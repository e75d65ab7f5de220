// A dynamic programme over chips and layers: the stages of least sum within limits.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "metis_line.h"

namespace planner::metis {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What Metis's formula takes the largest of, over the stages.
using Peaks = std::array<double, 3>;  // seconds of a micro-batch, of the update, of the gradients
constexpr Peaks kNoLimits{kInfinity, kInfinity, kInfinity};

struct Found {
  double sum_s = 0.0;  // what the formula adds up: execution, between and activations
  Peaks peaks{};
  std::vector<Stage> stages;
};

class Chain {
 public:
  Chain(const Problem& problem, int order, int micro_batches);

  // Nothing if no stages stay within the limits.
  std::optional<Found> find(const Peaks& limits);

 private:
  void limit(const Peaks& limits);
  void solve_chip(int chip);
  // What the stages after one cost by their first layer; false if there are none.
  bool towards(int chip, const Option& option, std::vector<double>& after) const;
  Found follow() const;
  double& best(int chip, int entry, int layer) { return best_[chip][entry * width_ + layer]; }
  double best(int chip, int entry, int layer) const { return best_[chip][entry * width_ + layer]; }

  const Problem& problem_;
  const int micro_batches_;
  const int width_;  // layers + 1
  const Line line_;
  std::vector<std::vector<int>> ends_;     // by group and first layer: within the limits
  std::vector<std::vector<double>> best_;  // by first chip, entry and first layer
  std::vector<double> after_;
};

}  // namespace planner::metis
