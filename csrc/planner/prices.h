// The linear relaxation of a division: how many groups counted units could form at most, and the
// price of a unit of each type under which every group costs at least 1.
#pragma once

#include <vector>

namespace planner {

// Maximises sum_p y_p subject to sum_p y_p patterns[p] <= everything, y >= 0, by the primal
// simplex method; gives the dual prices. For any counts left, left . prices bounds the groups that
// they can form.
std::vector<double> prices(const std::vector<std::vector<int>>& patterns,
                           const std::vector<int>& everything);

}  // namespace planner
