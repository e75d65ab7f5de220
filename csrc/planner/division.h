// Divides counted chips into device groups of enough power and memory each
// (AutoHet, section III-B; heteropp/search/grouping.py has the mathematics).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace planner {

using Counts = std::vector<int>;  // of each type of unit

struct Units {
  std::vector<double> power;   // of one unit of each type
  std::vector<double> memory;  // bytes
};

struct Division {
  std::optional<std::vector<Counts>> groups;  // none: there is no such division
  std::int64_t steps = 0;                     // groups tried
};

// Divides all of `everything` into `groups` groups, each of more than `least_power` effective
// power over `micro_batches` micro-batches, and of at least `least_memory` bytes.
Division divide(const Units& units, const Counts& everything, int groups, int micro_batches,
                double least_power, double least_memory);

}  // namespace planner
