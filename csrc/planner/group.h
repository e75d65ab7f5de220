// A problem's chip types made ready for the search: tables, and bounds on what is still to come.
#pragma once

#include <memory>
#include <vector>

#include "problem.h"

namespace planner {

// A lane, for one number of layers a stage if they are alike.
struct Track {
  const Lane* lane = nullptr;
  std::shared_ptr<const Reach> reach;
  int least_layers = 1;  // of a stage
  int most_layers = 1;
  // over its choices and these numbers of layers, the least
  double stage_s = kInfinity;       // T of a stage
  double bottleneck_s = kInfinity;  // of a stage
  double layer_s = kInfinity;       // T of a layer
  double chip_s = kInfinity;        // bottleneck of a layer x the chips of its stage
};

// What the chips of one type can do, and, together with those of the earlier types, what they
// cannot do better than. Memory counts only as far as it does whatever comes after.
struct Group {
  const ChipType* type = nullptr;
  std::vector<std::vector<std::array<Table, kKinds>>> tables;  // by choice, place, kind
  std::vector<Track> tracks;
  int least_stages = 0;
  int least_layers = 0;
  std::vector<double> sum_s;         // by layers: least sum of T
  std::vector<double> bottleneck_s;  // by layers: least bottleneck
};

// In pipeline order; pipelines have at most `longest` stages.
std::vector<Group> make_groups(const Problem& problem, int longest);

// No pipeline costs less.
double least_cost_s(const Problem& problem, const std::vector<Group>& groups);

// Leaves out stages whose bottleneck no pipeline that costs at most the limit can have; says
// whether there were any.
bool cut_layers(const Problem& problem, std::vector<Group>& groups, double limit_s);

}  // namespace planner
