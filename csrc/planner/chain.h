// The exact search for the best pipeline of a problem.
#pragma once

#include "problem.h"

namespace planner {

struct StageChoice {
  int type = 0;
  int choice = 0;
  int layers = 0;
};

struct Solution {
  double cost_s = kInfinity;         // section 4.3.2; infinite: none costs at most the cutoff
  double lower_bound_s = kInfinity;  // of every pipeline of the problem
  std::vector<StageChoice> stages;   // first to last
  std::int64_t steps = 0;            // stages tried
};

// Minimises  max_i (b T_i + U_i + alpha sum_{j != i} T_j).
//
// Stages are appended from the last to the first, since the memory of a stage depends on how many
// come after it. Of all chains that used the same chips and layers, those remain that no other
// beats in both bottleneck, max ((b - alpha) T + U), and sum of T; of these, those whose lower
// bound is within a limit, which rises from the least cost thought possible until a pipeline is
// found, or to `cutoff_s`. Of one length at most `width` remain, those of least lower bound; the
// least bound of the others is part of the solution's.
Solution solve(const Problem& problem, double cutoff_s, std::size_t width);

}  // namespace planner
