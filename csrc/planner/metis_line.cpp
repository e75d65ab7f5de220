#include "metis_line.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace planner::metis {

namespace {

constexpr double kRounding = 1e-9;  // as in metis_cost.py

void add(Sums& sums, const Sums& more) {
  if (sums.empty()) sums.assign(more.size(), 0.0);
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
}

}  // namespace

Line::Line(const Problem& problem, int order, int micro_batches)
    : problem_(problem), micro_batch_(problem.global_batch / micro_batches) {
  int node = 0;
  for (int type : problem.orders[order]) {
    for (const Node& candidate : problem.nodes) {
      if (candidate.type != type) continue;
      types_.insert(types_.end(), candidate.chips, type);
      nodes_.insert(nodes_.end(), candidate.chips, node++);
    }
  }
  options_.resize(chips());
  entries_.resize(chips());
  for (int chip = 0; chip < chips(); ++chip) add_options(chip);
}

void Line::add_options(int chip) {
  double inter = std::numeric_limits<double>::infinity();
  int reached = chip;
  for (int size = 1; chip + size <= chips(); size *= 2) {
    for (; reached < chip + size; ++reached) {
      inter = std::min(inter, problem_.types[types_[reached]].inter_bytes_per_s);
    }
    const Entry entry{nodes_[chip] == nodes_[chip + size - 1], inter};
    auto& entries = entries_[chip];
    auto place = std::find(entries.begin(), entries.end(), entry);
    const int index = static_cast<int>(place - entries.begin());
    bool used = false;
    for (int tp : problem_.degrees) {
      if (size % tp != 0) continue;
      const int group = find_group(chip, size, tp);
      if (group < 0) continue;
      options_[chip].push_back({size, tp, group, index});
      used = true;
    }
    if (used && place == entries.end()) entries.push_back(entry);
  }
}

double Line::bandwidth(int first, int last) const {
  if (nodes_[first] == nodes_[last - 1]) return problem_.types[types_[first]].intra_bytes_per_s;
  double slowest = std::numeric_limits<double>::infinity();
  for (int chip = first; chip < last; ++chip) {
    slowest = std::min(slowest, problem_.types[types_[chip]].inter_bytes_per_s);
  }
  return slowest;
}

double Line::across(int first, int dp, int tp) const {
  const int last = first + (dp - 1) * tp;
  if (nodes_[first] == nodes_[last])
    return problem_.types[types_[first]].collective_bytes_per_s[dp];
  return bandwidth(first, last + 1);
}

double Line::bandwidth(int first, int last, const Entry& next) const {
  if (next.inside && nodes_[first] == nodes_[last]) {
    return problem_.types[types_[first]].intra_bytes_per_s;
  }
  double slowest = next.inter_bytes_per_s;
  for (int chip = first; chip < last; ++chip) {
    slowest = std::min(slowest, problem_.types[types_[chip]].inter_bytes_per_s);
  }
  return slowest;
}

int Line::find_group(int first, int size, int tp) {
  for (int head = first; head < first + size; head += tp) {
    if (nodes_[head] != nodes_[head + tp - 1]) return -1;  // tp is profiled inside a node
  }
  const double across = this->across(first, size / tp, tp);
  std::vector<double> key{static_cast<double>(tp), across};
  for (int chip = first; chip < first + size;) {
    int end = chip;
    while (end < first + size && types_[end] == types_[chip]) ++end;
    key.push_back(types_[chip]);
    key.push_back(end - chip);
    chip = end;
  }
  auto [place, fresh] = known_.try_emplace(std::move(key), -1);
  if (fresh) {
    Group group;
    if (make_group(first, size, tp, across, group)) {
      place->second = groups();
      groups_.push_back(std::move(group));
    }
  }
  return place->second;
}

bool Line::make_group(int first, int size, int tp, double across, Group& group) const {
  const int layers = problem_.layers, dp = size / tp, width = layers + 1;
  std::vector<int> shares;
  if (!share_out(first, dp, tp, shares)) return false;
  std::map<std::pair<int, int>, int> counts;
  for (int i = 0; i < dp; ++i) ++counts[{types_[first + i * tp], shares[i]}];
  group.gradients_s = 2.0 * (dp - 1) / (dp * tp * across);
  group.activation_bytes =
      problem_.activation_bytes * *std::max_element(shares.begin(), shares.end());
  group.seconds.assign(width * width, 0.0);
  // one replica's memory counts, or all of a mixed stage's, against all its chips'
  const bool mixed = problem_.pooled && counts.begin()->first.first != counts.rbegin()->first.first;
  std::vector<Sums> needs;
  std::vector<double> rooms;
  for (const auto& [key, count] : counts) {
    Profile profile;
    if (!make_profile(key.first, tp, key.second, profile)) return false;
    group.between_s = std::max(group.between_s, profile.between_s);
    group.update_s = std::max(group.update_s, problem_.types[key.first].update_s / (layers * tp));
    for (int from = 0; from < layers; ++from) {
      for (int to = from + 1; to <= layers; ++to) {
        double& seconds = group.seconds[from * width + to];
        seconds = std::max(seconds, profile.seconds[to] - profile.seconds[from]);
      }
    }
    Sums need(width);
    for (int i = 0; i < width; ++i) {
      need[i] = profile.held_bytes[i] + profile.divided_bytes[i] / dp;
      if (mixed) need[i] *= count;
    }
    if (!problem_.pooled || needs.empty()) {
      needs.push_back(need);
      rooms.push_back(problem_.pooled ? 0.0 : profile.capacity_bytes);
    } else if (mixed) {
      add(needs[0], need);
    } else {
      needs[0] = need;  // a larger share's
    }
    if (problem_.pooled) rooms[0] += count * tp * profile.capacity_bytes;
  }
  group.longest.assign(layers, 0);
  for (int from = 0; from < layers; ++from) {
    int to = from;
    const auto fits = [&](int end) {
      for (std::size_t i = 0; i < needs.size(); ++i) {
        if (needs[i][end] - needs[i][from] > rooms[i]) return false;
      }
      return true;
    };
    while (to < layers && fits(to + 1)) ++to;
    group.longest[from] = to;
  }
  return true;
}

// In proportion to the speed at one sequence; largest remainders first. As metis_cost.share_out.
bool Line::share_out(int first, int dp, int tp, std::vector<int>& shares) const {
  std::vector<double> speeds(dp);
  for (int i = 0; i < dp; ++i) {
    const auto& profiles = problem_.types[types_[first + i * tp]].profiles;
    const auto found = profiles.find({tp, 1});
    speeds[i] = found == profiles.end() ? 0.0 : 1.0 / found->second.seconds.back();
  }
  const double total = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  if (total == 0.0) return false;
  shares.resize(dp);
  std::vector<double> over(dp);  // what a share is more than exact
  int rest = micro_batch_;
  for (int i = 0; i < dp; ++i) {
    const double exact = micro_batch_ * speeds[i] / total;
    shares[i] = static_cast<int>(exact + kRounding);
    over[i] = shares[i] - exact;
    rest -= shares[i];
  }
  std::vector<int> by_remainder(dp);
  std::iota(by_remainder.begin(), by_remainder.end(), 0);
  std::stable_sort(by_remainder.begin(), by_remainder.end(),
                   [&](int a, int b) { return over[a] < over[b]; });
  for (int i = 0; i < rest; ++i) ++shares[by_remainder[i]];
  return *std::min_element(shares.begin(), shares.end()) >= 1;
}

bool Line::make_profile(int type, int tp, int share, Profile& profile) const {
  const auto& profiles = problem_.types[type].profiles;
  if (share > problem_.largest_batch) return false;
  if (const auto found = profiles.find({tp, share}); found != profiles.end()) {
    profile = found->second;
    return true;
  }
  for (int part = 1; part <= share; part *= 2) {  // its binary parts, one after another
    if ((share & part) == 0) continue;
    const auto found = profiles.find({tp, part});
    if (found == profiles.end()) return false;
    add(profile.seconds, found->second.seconds);
    profile.between_s += found->second.between_s;
    profile.held_bytes = found->second.held_bytes;
    profile.divided_bytes = found->second.divided_bytes;
    profile.capacity_bytes = found->second.capacity_bytes;
  }
  return true;
}

}  // namespace planner::metis
