#include "metis_chain.h"

#include <algorithm>

namespace planner::metis {

Chain::Chain(const Problem& problem, int order, int micro_batches)
    : problem_(problem),
      micro_batches_(micro_batches),
      width_(problem.layers + 1),
      line_(problem, order, micro_batches),
      ends_(line_.groups()),
      best_(line_.chips()),
      after_(width_) {
  for (int chip = 0; chip < line_.chips(); ++chip) {
    best_[chip].resize(line_.entries(chip).size() * width_);
  }
}

std::optional<Found> Chain::find(const Peaks& limits) {
  limit(limits);
  for (int chip = line_.chips() - 1; chip >= 0; --chip) solve_chip(chip);
  double least = kInfinity;
  for (std::size_t entry = 0; entry < line_.entries(0).size(); ++entry) {
    least = std::min(least, best(0, entry, 0));
  }
  if (least == kInfinity) return std::nullopt;
  return follow();
}

void Chain::limit(const Peaks& limits) {
  const Sums& parameters = problem_.parameter_bytes;
  for (int index = 0; index < line_.groups(); ++index) {
    const Group& group = line_.group(index);
    auto& ends = ends_[index];
    ends.resize(problem_.layers);
    for (int from = 0, to = 0; from < problem_.layers; ++from) {
      to = std::max(to, from);
      while (to < group.longest[from] && group.seconds[from * width_ + to + 1] <= limits[0] &&
             group.update_s * (to + 1 - from) <= limits[1] &&
             group.gradients_s * (parameters[to + 1] - parameters[from]) <= limits[2]) {
        ++to;
      }
      ends[from] = to;
    }
  }
}

bool Chain::towards(int chip, const Option& option, std::vector<double>& after) const {
  const int next = chip + option.chips;
  const Group& group = line_.group(option.group);
  after.assign(width_, kInfinity);
  if (next == line_.chips()) {
    after[problem_.layers] = micro_batches_ * group.between_s;
    return true;
  }
  bool any = false;
  const auto& entries = line_.entries(next);
  for (std::size_t entry = 0; entry < entries.size(); ++entry) {
    const double send_s = group.activation_bytes / line_.bandwidth(chip, next, entries[entry]);
    for (int layer = 1; layer < problem_.layers; ++layer) {
      const double value = best(next, entry, layer) + send_s;
      if (value < after[layer]) {
        after[layer] = value;
        any = true;
      }
    }
  }
  return any;
}

void Chain::solve_chip(int chip) {
  std::fill(best_[chip].begin(), best_[chip].end(), kInfinity);
  for (const Option& option : line_.options(chip)) {
    if (!towards(chip, option, after_)) continue;
    const Group& group = line_.group(option.group);
    const auto& ends = ends_[option.group];
    int low = 0, high = problem_.layers;
    while (after_[low] == kInfinity) ++low;
    while (after_[high] == kInfinity) --high;
    const int firsts = chip == 0 ? 1 : high;
    for (int from = chip == 0 ? 0 : 1; from < firsts; ++from) {
      const double* seconds = &group.seconds[from * width_];
      const int last = std::min(ends[from], high);
      double least = kInfinity;
      for (int to = std::max(from + 1, low); to <= last; ++to) {
        least = std::min(least, seconds[to] + after_[to]);
      }
      double& value = best(chip, option.entry, from);
      value = std::min(value, least);
    }
  }
}

Found Chain::follow() const {
  Found found;
  std::vector<double> after;
  int chip = 0, layer = 0, entry = 0;
  for (std::size_t other = 1; other < line_.entries(0).size(); ++other) {
    if (best(0, other, 0) < best(0, entry, 0)) entry = other;
  }
  found.sum_s = best(0, entry, 0);
  while (chip < line_.chips()) {
    const double value = best(chip, entry, layer);
    const Option* chosen = nullptr;
    int end = 0;
    for (const Option& option : line_.options(chip)) {
      if (chosen != nullptr || option.entry != entry || !towards(chip, option, after)) continue;
      const Group& group = line_.group(option.group);
      for (int to = layer + 1; to <= ends_[option.group][layer] && chosen == nullptr; ++to) {
        if (group.seconds[layer * width_ + to] + after[to] == value) {
          chosen = &option;
          end = to;
        }
      }
    }
    const Group& group = line_.group(chosen->group);
    const int next = chip + chosen->chips;
    const double bytes = problem_.parameter_bytes[end] - problem_.parameter_bytes[layer];
    const Peaks own{group.seconds[layer * width_ + end], group.update_s * (end - layer),
                    group.gradients_s * bytes};
    for (std::size_t i = 0; i < own.size(); ++i) {
      found.peaks[i] = std::max(found.peaks[i], own[i]);
    }
    found.stages.push_back({chosen->chips, chosen->tp, end - layer});
    if (next < line_.chips()) {
      towards(chip, *chosen, after);
      const auto& entries = line_.entries(next);
      for (std::size_t other = 0; other < entries.size(); ++other) {
        const double send_s = group.activation_bytes / line_.bandwidth(chip, next, entries[other]);
        if (best(next, other, end) + send_s == after[end]) entry = static_cast<int>(other);
      }
    }
    chip = next;
    layer = end;
  }
  return found;
}

}  // namespace planner::metis
