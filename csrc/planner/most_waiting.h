// How many boundary tensors wait for a stage at most; heteropp/schedule/inboxes.py says what for.
#pragma once

#include <array>
#include <vector>

#include "memory_walk.h"

namespace planner {

// stage and ministage before, and stage and ministage after
using Between = std::array<int, 4>;
using Waiting = std::array<int, 4>;  // stage, ministage, kind of receive, and how many

// Runs the stages' tables where every action takes its ideal time and messages take none. Throws
// std::runtime_error where stages wait for ever.
std::vector<Waiting> most_waiting(const std::vector<std::vector<Coded>>& tables,
                                  const std::vector<Between>& between);

}  // namespace planner
