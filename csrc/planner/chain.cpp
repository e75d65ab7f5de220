#include "chain.h"

#include <algorithm>
#include <tuple>

#include "group.h"

namespace planner {
namespace {

constexpr double kRounding = 1e-12;  // relative; bounds and costs are summed in unlike orders
constexpr double kFirstMore = 0.04;  // of the least cost thought possible, the limit is higher
constexpr double kMore = 1.5;
constexpr double kLastMore = 100.0;  // then it is the cutoff
constexpr std::size_t kFew = 64;     // chains of one length

// Most stages of a pipeline.
int longest(const Problem& problem) {
  int stages = std::min(static_cast<int>(problem.in_flight.size()), problem.layers);
  return problem.stages > 0 ? std::min(stages, problem.stages) : stages;
}

// A chain of stages, the last stage of the pipeline first.
struct Chain {
  double bottleneck_s = 0.0;
  double sum_s = 0.0;
  double bound_s = 0.0;  // no pipeline that it becomes costs less
  int before = -1;       // the chain that it lengthens
  int lane = -1;         // of its chip type
  int chips = 0;         // of its chip type
  int layers = 0;
  StageChoice stage;
};

// Chains that can become the same pipelines, best first.
auto order(const Chain& chain) {
  return std::tie(chain.lane, chain.chips, chain.layers, chain.bottleneck_s, chain.sum_s);
}

class ChainSearch {
 public:
  // `groups` are made from the problem, and cut at the limit.
  ChainSearch(const Problem& problem, std::vector<Group> groups, double limit_s, std::size_t width)
      : problem_(problem), groups_(std::move(groups)), limit_s_(limit_s), width_(width) {
    longest_ = longest(problem);
  }

  // Whether a chain was left out only because of the limit.
  bool limited() const { return limited_; }

  Solution run() {
    Waves waves(static_cast<std::size_t>(longest_) + 1);
    waves[0].push_back(Chain{});
    for (std::size_t index = problem_.types.size(); index-- > 0;) waves = pass(index, waves);
    const Chain* best = nullptr;
    for (const auto& wave : waves) {
      for (const Chain& chain : wave) {
        if (best == nullptr || cost_s(chain) < cost_s(*best)) best = &chain;
      }
    }
    solution_.lower_bound_s = dropped_s_;
    if (best != nullptr) {
      solution_.cost_s = cost_s(*best);
      solution_.lower_bound_s = std::min(dropped_s_, solution_.cost_s);
      for (const Chain* chain = best;; chain = &kept_[static_cast<std::size_t>(chain->before)]) {
        if (chain->stage.layers == 0) break;
        solution_.stages.push_back(chain->stage);
      }
    }
    return solution_;
  }

 private:
  using Waves = std::vector<std::vector<Chain>>;  // by number of stages

  double cost_s(const Chain& chain) const {
    return chain.bottleneck_s + problem_.alpha * chain.sum_s;
  }

  // Lengthens chains by all the stages of one chip type.
  Waves pass(std::size_t index, Waves& entries) {
    Waves waves(entries.size()), exits(entries.size());
    for (std::size_t length = 0; length + 1 < waves.size(); ++length) {
      reduce(waves[length]);
      const int kept = keep(waves[length]);
      for (std::size_t i = 0; i < waves[length].size(); ++i) {
        Chain chain = waves[length][i];
        chain.before = kept + static_cast<int>(i);
        lengthen(index, chain, length, waves[length + 1], exits[length + 1]);
      }
      const int entered = keep(entries[length]);
      for (std::size_t i = 0; i < entries[length].size(); ++i) {
        Chain chain = entries[length][i];
        chain.before = entered + static_cast<int>(i);
        for (std::size_t lane = 0; lane < groups_[index].tracks.size(); ++lane) {
          chain.lane = static_cast<int>(lane);
          lengthen(index, chain, length, waves[length + 1], exits[length + 1]);
        }
      }
    }
    for (auto& exit : exits) {
      for (Chain& chain : exit) chain.lane = -1, chain.chips = 0;
      reduce(exit);
    }
    return exits;
  }

  int keep(const std::vector<Chain>& chains) {
    const auto first = static_cast<int>(kept_.size());
    kept_.insert(kept_.end(), chains.begin(), chains.end());
    return first;
  }

  void lengthen(std::size_t index, const Chain& chain, std::size_t length, std::vector<Chain>& wave,
                std::vector<Chain>& exit) {
    const Group& group = groups_[index];
    const Track& track = group.tracks[static_cast<std::size_t>(chain.lane)];
    const int earlier_stages = index > 0 ? groups_[index - 1].least_stages : 0;
    const int earlier_layers = index > 0 ? groups_[index - 1].least_layers : 0;
    const bool last = index + 1 == groups_.size() && length == 0;
    for (int choice : track.lane->choices) {
      const Choice& option = group.type->choices[static_cast<std::size_t>(choice)];
      const int left = group.type->chips - chain.chips - option.chips;  // also its first chip
      if (left < 0 || left % option.align != 0 || !track.reach->possible(left)) continue;
      const int stages = track.reach->least(left) + earlier_stages;
      if (static_cast<int>(length) + 1 + stages > longest_) continue;
      const auto& places = group.tables[static_cast<std::size_t>(choice)];
      const std::size_t place =
          option.places[static_cast<std::size_t>(left / option.align) % option.places.size()];
      const Table& table =
          places[place][static_cast<std::size_t>(kind_of(index == 0 && left == 0, last))];
      const int free = problem_.layers - chain.layers;
      const int reserved = track.reach->least(left) * track.least_layers + earlier_layers;
      int least = track.least_layers;
      const int most = std::min({track.most_layers, free - reserved, table.most_layers[length]});
      if (index == 0) {  // the rest of this type's stages hold the rest of the layers
        least = std::max(least, free - track.reach->most(left) * track.most_layers);
      }
      for (int layers = least; layers <= most; ++layers) {
        ++solution_.steps;
        const auto at = static_cast<std::size_t>(layers);
        const double bottleneck_s = std::max(chain.bottleneck_s, table.bottleneck_s[at]);
        const double sum_s = chain.sum_s + table.time_s[at];
        const double bound_s = bound(index, track, left, free - layers, bottleneck_s, sum_s);
        if (bound_s == kInfinity) continue;
        if (bound_s > limit_s_) {
          limited_ = true;
          continue;
        }
        Chain longer = chain;
        longer.bottleneck_s = bottleneck_s;
        longer.sum_s = sum_s;
        longer.bound_s = bound_s;
        longer.chips += option.chips;
        longer.layers += layers;
        longer.stage = {static_cast<int>(index), choice, layers};
        if (left > 0) {
          wave.push_back(longer);
        } else if (index > 0 || complete(longer, length + 1)) {
          exit.push_back(longer);
        }
      }
    }
  }

  bool complete(const Chain& chain, std::size_t length) const {
    return chain.layers == problem_.layers &&
           (problem_.stages == 0 || static_cast<int>(length) == problem_.stages);
  }

  // Of a chain with the best rest there may be, its sum and its bottleneck apart; `chips` of this
  // type and `left` layers are still to use.
  double bound(std::size_t index, const Track& track, int chips, int left, double bottleneck_s,
               double sum_s) const {
    if (chips == 0) return bound_earlier(index, left, bottleneck_s, sum_s);
    // the stages still to come of this type hold some of the layers, the earlier types the others
    const bool alike = track.lane->alike;
    const int step = alike ? track.least_layers : 1;
    const int most = std::min(left, alike ? track.reach->most(chips) * step : left);
    double least_s = kInfinity;
    for (int own = track.reach->least(chips) * step; own <= most; own += step) {
      const double own_s = alike ? own / step * track.stage_s : own * track.layer_s;
      const double slowest_s =
          std::max({bottleneck_s, track.bottleneck_s, own * track.chip_s / chips});
      least_s = std::min(least_s, bound_earlier(index, left - own, slowest_s, sum_s + own_s));
    }
    return least_s;
  }

  // The same where the earlier types hold all the layers that are left.
  double bound_earlier(std::size_t index, int left, double bottleneck_s, double sum_s) const {
    if ((left > 0) != (index > 0)) return kInfinity;
    if (index > 0) {
      const Group& earlier = groups_[index - 1];
      sum_s += earlier.sum_s[static_cast<std::size_t>(left)];
      bottleneck_s = std::max(bottleneck_s, earlier.bottleneck_s[static_cast<std::size_t>(left)]);
    }
    return bottleneck_s + problem_.alpha * sum_s;
  }

  // Drops chains that another beats, then those beyond the width.
  void reduce(std::vector<Chain>& chains) {
    std::stable_sort(chains.begin(), chains.end(),
                     [](const Chain& a, const Chain& b) { return order(a) < order(b); });
    std::size_t count = 0;
    for (const Chain& chain : chains) {
      const Chain* rival = count > 0 ? &chains[count - 1] : nullptr;
      const bool alike = rival != nullptr && rival->lane == chain.lane &&
                         rival->chips == chain.chips && rival->layers == chain.layers;
      if (!alike || chain.sum_s < rival->sum_s) chains[count++] = chain;
    }
    chains.resize(count);
    if (count <= width_) return;
    const auto nearer = [](const Chain& a, const Chain& b) { return a.bound_s < b.bound_s; };
    std::stable_sort(chains.begin(), chains.end(), nearer);
    dropped_s_ = std::min(dropped_s_, chains[width_].bound_s);
    chains.resize(width_);
  }

  const Problem& problem_;
  const std::vector<Group> groups_;
  const double limit_s_;
  const std::size_t width_;
  int longest_ = 0;  // stages
  bool limited_ = false;
  std::vector<Chain> kept_;  // that others lengthen
  double dropped_s_ = kInfinity;
  Solution solution_;
};

}  // namespace

Solution solve(const Problem& problem, double cutoff_s, std::size_t width) {
  Solution solution;
  if (longest(problem) < static_cast<int>(problem.types.size())) return solution;
  const std::vector<Group> groups = make_groups(problem, longest(problem));
  const double least_s = least_cost_s(problem, groups);
  if (least_s == kInfinity) return solution;
  std::int64_t steps = 0;
  bool limited = false;
  const auto search = [&](double limit_s, std::size_t most) {
    std::vector<Group> cut = groups;
    limited = cut_layers(problem, cut, limit_s);
    ChainSearch one(problem, std::move(cut), limit_s, most);
    solution = one.run();
    steps += solution.steps;
    limited |= one.limited();
  };
  // a few chains within a limit that rises find a good pipeline; then all within its cost
  double limit_s = 0.0;
  for (double more = kFirstMore;; more *= kMore) {
    limit_s = more < kLastMore ? std::min(cutoff_s, least_s * (1 + more)) : cutoff_s;
    limit_s *= 1 + kRounding;
    search(limit_s, std::min(width, kFew));
    if (!solution.stages.empty() || !limited || limit_s >= cutoff_s) break;
  }
  if (!solution.stages.empty()) limit_s = std::min(limit_s, solution.cost_s * (1 + kRounding));
  if (width > kFew) search(limit_s, width);
  solution.steps = steps;
  return solution;
}

}  // namespace planner
