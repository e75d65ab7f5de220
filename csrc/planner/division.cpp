#include "division.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>

#include "prices.h"

namespace planner {

namespace {

constexpr double kTolerance = 1e-12;  // relative, of sums made in another order

class DivisionSearch {
 public:
  DivisionSearch(const Units& units, const Counts& everything, int micro_batches,
                 double least_power, double least_memory)
      : units_(units),
        everything_(everything),
        micro_batches_(micro_batches),
        least_power_(least_power),
        least_memory_(least_memory),
        need_(least_power * (micro_batches - 1) / micro_batches) {
    for (double power : units.power) worth_.push_back(power - least_power / micro_batches);
    // types that only weaken a group first: their counts are free, those of the others least
    order_.resize(everything.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return (worth_[a] < 0) > (worth_[b] < 0); });
    Counts group(everything.size(), 0);
    collect(group, 0);
    std::sort(patterns_.begin(), patterns_.end());
    std::vector<Counts> groups;
    for (const Pattern& pattern : patterns_) groups.push_back(pattern.group);
    prices_ = cover(prices(groups, everything), groups);
  }

  // Divides what is left; the groups found are appended. False: there is no division.
  bool divide(const Counts& left, int groups, std::vector<Counts>& found) {
    if (!may_suffice(left, groups)) return false;
    if (groups == 1) {  // what the other groups did not need strengthens this one
      if (!suffices(left)) return false;
      found.push_back(left);
      return true;
    }
    const auto [dead, fresh] = dead_.try_emplace(key(left), groups + 1);
    if (!fresh && dead->second <= groups) return false;  // fewer groups would have been easier
    for (const Pattern& pattern : patterns_) {
      if (!within(pattern.group, left)) continue;
      ++steps_;
      Counts rest(left);
      for (std::size_t t = 0; t < rest.size(); ++t) rest[t] -= pattern.group[t];
      found.push_back(pattern.group);
      if (divide(rest, groups - 1, found)) return true;
      found.pop_back();
    }
    int& least = dead_[key(left)];
    least = std::min(least, groups);
    return false;
  }

  std::int64_t steps() const { return steps_; }

 private:
  struct Pattern {
    double surplus;
    Counts group;
    auto operator<=>(const Pattern&) const = default;
  };

  // All groups that suffice, and would not without any one unit that strengthens them.
  void collect(Counts& group, std::size_t index) {
    if (index == order_.size()) {
      if (suffices(group) && minimal(group)) patterns_.push_back({surplus(group), group});
      return;
    }
    const int type = order_[index];
    for (int count = 0; count <= everything_[type]; ++count) {
      group[type] = count;
      collect(group, index + 1);
      if (worth_[type] >= 0 && suffices(group)) break;  // with more it would not be the least
    }
    group[type] = 0;
  }

  bool minimal(const Counts& group) const {
    Counts less(group);
    for (std::size_t t = 0; t < group.size(); ++t) {
      if (worth_[t] < 0 || group[t] == 0) continue;
      --less[t];
      const bool still = suffices(less);
      ++less[t];
      if (still) return false;
    }
    return true;
  }

  bool suffices(const Counts& group) const {
    double power = 0, memory = 0;
    int size = 0;
    for (std::size_t t = 0; t < group.size(); ++t) {
      power += units_.power[t] * group[t];
      memory += units_.memory[t] * group[t];
      size += group[t];
    }
    return size > 0 && memory >= least_memory_ &&
           power * micro_batches_ / (micro_batches_ + size - 1) > least_power_;
  }

  // Prices under which every pattern costs at least 1, also after rounding errors.
  static std::vector<double> cover(std::vector<double> prices, const std::vector<Counts>& groups) {
    double least = 1;
    for (double& price : prices) price = std::max(price, 0.0);
    for (const Counts& group : groups) {
      double cost = 0;
      for (std::size_t t = 0; t < group.size(); ++t) cost += prices[t] * group[t];
      least = std::min(least, cost);
    }
    if (least <= 0) return {};
    for (double& price : prices) price /= least;
    return prices;
  }

  bool may_suffice(const Counts& left, int groups) const {
    double worth = 0, memory = 0, size = 0, cost = 0;
    for (std::size_t t = 0; t < left.size(); ++t) {
      if (!prices_.empty()) cost += prices_[t] * left[t];
      worth += worth_[t] * left[t];
      memory += units_.memory[t] * left[t];
      size += std::abs(worth_[t]) * left[t];
    }
    if (!prices_.empty() && cost < groups * (1 - 1e-9)) return false;
    return memory >= groups * least_memory_ * (1 - kTolerance) &&
           worth >= groups * need_ - size * kTolerance;
  }

  double surplus(const Counts& group) const {
    double worth = -need_;
    for (std::size_t t = 0; t < group.size(); ++t) worth += worth_[t] * group[t];
    return worth;
  }

  static bool within(const Counts& group, const Counts& left) {
    for (std::size_t t = 0; t < group.size(); ++t)
      if (group[t] > left[t]) return false;
    return true;
  }

  std::uint64_t key(const Counts& left) const {
    std::uint64_t key = 0;
    for (std::size_t t = 0; t < left.size(); ++t) key = key * (everything_[t] + 1) + left[t];
    return key;
  }

  const Units& units_;
  const Counts& everything_;
  const int micro_batches_;
  const double least_power_, least_memory_, need_;
  std::vector<double> worth_;
  std::vector<int> order_;
  std::vector<Pattern> patterns_;
  std::vector<double> prices_;                   // empty: none were found
  std::unordered_map<std::uint64_t, int> dead_;  // what is left: groups it cannot be divided into
  std::int64_t steps_ = 0;
};

}  // namespace

Division divide(const Units& units, const Counts& everything, int groups, int micro_batches,
                double least_power, double least_memory) {
  DivisionSearch search(units, everything, micro_batches, least_power, least_memory);
  Division division;
  std::vector<Counts> found;
  if (search.divide(everything, groups, found)) division.groups = found;
  division.steps = search.steps();
  return division;
}

}  // namespace planner
