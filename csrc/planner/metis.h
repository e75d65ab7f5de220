// The best plan under Metis's cost (heteropp/search/metis_cost.py has the formula), proven.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace planner::metis {

using Sums = std::vector<double>;  // running sums over the layers, from 0

// One chip type's replica at one tensor-parallel degree and batch.
struct Profile {
  Sums seconds;
  double between_s = 0.0;
  Sums held_bytes;     // of one chip, divided_bytes / dp not included
  Sums divided_bytes;  // among the replicas
  double capacity_bytes = 0.0;
};

struct ChipType {
  double intra_bytes_per_s = 0.0;
  double inter_bytes_per_s = 0.0;
  std::vector<double> collective_bytes_per_s;  // of a group inside a node, by its ranks from 0 on
  double update_s = 0.0;                       // of the whole model
  std::map<std::pair<int, int>, Profile> profiles;  // by (tp, batch)
};

struct Node {
  int type = 0;
  int chips = 0;
};

struct Problem {
  int layers = 0;
  int global_batch = 0;  // sequences
  int largest_batch = 0;
  std::vector<ChipType> types;
  std::vector<Node> nodes;
  std::vector<std::vector<int>> orders;  // of the types
  std::vector<int> micro_batches;        // counts to choose from
  std::vector<int> degrees;              // of tensor parallelism
  Sums parameter_bytes;
  double activation_bytes = 0.0;  // of one sequence
  double batch_s = 0.0;           // to make a micro-batch's data
  bool pooled = true;             // memory by Metis's rule; or each chip holds its own
  double busy_s = 0.0;            // no chip can be busy for less in a step
};

struct Stage {
  int chips = 0;
  int tp = 0;
  int layers = 0;
};

struct Solution {
  double cost_s = 0.0;         // infinite: no plan fits
  double lower_bound_s = 0.0;  // no plan costs less
  int order = 0;
  int micro_batches = 0;
  std::vector<Stage> stages;
  std::int64_t steps = 0;  // dynamic programmes solved
};

// The best plan of any device groups, a power of two chips each; or, where `most_steps` dynamic
// programmes do not tell, the best found and a bound.
Solution solve(const Problem& problem, std::int64_t most_steps);

}  // namespace planner::metis
