#include "problem.h"

#include <algorithm>
#include <numeric>

namespace planner {
namespace {

double largest(const std::vector<Line>& lines, int layers) {
  double value = lines.empty() ? kInfinity : -kInfinity;
  for (const Line& line : lines) value = std::max(value, line.fixed + layers * line.per_layer);
  return value;
}

double bytes(const Plane& plane, int layers, double in_flight) {
  return plane.fixed + layers * plane.per_layer +
         (in_flight - 1) * (plane.kept + layers * plane.kept_per_layer);
}

}  // namespace

Table tabulate(const Problem& problem, const Cost& cost, double capacity_bytes) {
  Table table;
  const auto count = static_cast<std::size_t>(problem.layers) + 1;
  table.time_s.assign(count, kInfinity);
  table.bottleneck_s.assign(count, kInfinity);
  table.most_layers.assign(problem.in_flight.size(), 0);
  if (cost.time_s.empty()) return table;
  for (int layers = 1; layers <= problem.layers; ++layers) {
    const auto at = static_cast<std::size_t>(layers);
    double time_s = 0.0, update_s = 0.0;
    if (cost.measured_s.empty()) {
      time_s = largest(cost.time_s, layers);
      update_s = largest(cost.update_s, layers);
    } else {
      time_s = cost.measured_s[at - 1][0];
      update_s = cost.measured_s[at - 1][1];
    }
    table.time_s[at] = time_s;
    table.bottleneck_s[at] = (problem.micro_batches - problem.alpha) * time_s + update_s;
  }
  const auto fits = [&](int layers, double in_flight) {
    const auto before = static_cast<std::size_t>(problem.micro_batches - in_flight);
    const auto rank_fits = [&](const Working& working) {
      const double boundary = working.boundary[std::min(before, working.boundary.size() - 1)];
      return bytes(working.plane, layers, in_flight) + boundary <= capacity_bytes;
    };
    return std::all_of(cost.working.begin(), cost.working.end(), rank_fits) &&
           largest(cost.alone, layers) <= capacity_bytes;
  };
  int most = problem.layers;
  for (std::size_t after = 0; after < problem.in_flight.size(); ++after) {
    const double in_flight = problem.in_flight[after];
    if (after > 0 && in_flight < problem.in_flight[after - 1]) most = problem.layers;
    while (most > 0 && !fits(most, in_flight)) --most;
    table.most_layers[after] = most;
  }
  return table;
}

Reach::Reach(const ChipType& type, const Lane& lane) : unit_(0) {
  for (int choice : lane.choices) {
    unit_ = std::gcd(unit_, type.choices[static_cast<std::size_t>(choice)].chips);
  }
  const auto count = static_cast<std::size_t>(type.chips / unit_) + 1;
  least_.assign(count, static_cast<int>(count) + 1);
  most_.assign(count, -1);
  least_[0] = most_[0] = 0;
  for (std::size_t chips = 1; chips < count; ++chips) {
    for (int choice : lane.choices) {
      const auto size =
          static_cast<std::size_t>(type.choices[static_cast<std::size_t>(choice)].chips / unit_);
      if (size > chips || most_[chips - size] < 0) continue;
      least_[chips] = std::min(least_[chips], least_[chips - size] + 1);
      most_[chips] = std::max(most_[chips], most_[chips - size] + 1);
    }
  }
}

}  // namespace planner
