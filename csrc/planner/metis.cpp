#include "metis.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <queue>
#include <tuple>

#include "metis_chain.h"

namespace planner::metis {

namespace {

constexpr double kNarrow = 1e-3;  // of the best cost

// Plans of one order and number of micro-batches whose peaks lie between two corners.
struct Box {
  double bound_s = 0.0;
  std::int64_t number = 0;  // breaks ties, so that the search is the same everywhere
  int chain = 0;
  Peaks low{};
  Peaks high{};
  std::shared_ptr<const Found> found;  // of least sum with peaks up to the higher corner

  bool operator<(const Box& other) const {  // for std::priority_queue: least bound first
    return std::tie(bound_s, number) > std::tie(other.bound_s, other.number);
  }
};

class Search {
 public:
  Search(const Problem& problem, std::int64_t most_steps)
      : problem_(problem), most_steps_(most_steps) {
    best_.cost_s = kInfinity;
  }

  Solution run() {
    for (std::size_t order = 0; order < problem_.orders.size(); ++order) {
      for (int micro_batches : problem_.micro_batches) {
        start(static_cast<int>(order), micro_batches);
      }
    }
    while (!boxes_.empty() && !done(boxes_.top().bound_s) && best_.steps < most_steps_) {
      const Box box = boxes_.top();
      boxes_.pop();
      split(box);
    }
    best_.lower_bound_s = best_.cost_s;
    if (!boxes_.empty()) best_.lower_bound_s = std::min(best_.cost_s, boxes_.top().bound_s);
    return std::move(best_);
  }

 private:
  struct Start {
    int order = 0;
    int micro_batches = 0;
    Peaks weights{};
    double fixed_s = 0.0;
    std::unique_ptr<Chain> chain;
  };

  bool done(double bound_s) const { return bound_s >= best_.cost_s; }

  void start(int order, int micro_batches) {
    starts_.push_back({order,
                       micro_batches,
                       {micro_batches - 1.0, 1.0, 1.0},
                       micro_batches * problem_.batch_s,
                       std::make_unique<Chain>(problem_, order, micro_batches)});
    const int chain = static_cast<int>(starts_.size()) - 1;
    add(chain, {problem_.busy_s / micro_batches * (1 - 1e-12), 0.0, 0.0}, kNoLimits);
  }

  // Solves a box, unless it holds no plan that matters.
  void add(int chain, const Peaks& low, const Peaks& high) {
    ++best_.steps;
    auto found = starts_[chain].chain->find(high);
    if (!found) return;
    const double cost_s = cost(chain, found->peaks, found->sum_s);
    if (cost_s < best_.cost_s) {
      best_.cost_s = cost_s;
      best_.order = starts_[chain].order;
      best_.micro_batches = starts_[chain].micro_batches;
      best_.stages = found->stages;
    }
    push(chain, low, high, std::make_shared<const Found>(std::move(*found)));
  }

  void push(int chain, const Peaks& low, const Peaks& high, std::shared_ptr<const Found> found) {
    const double bound_s = cost(chain, low, found->sum_s);
    if (!done(bound_s)) boxes_.push({bound_s, numbers_++, chain, low, high, std::move(found)});
  }

  // By the peak that parts the bound from the plan most. Above, the same plan has the least sum.
  void split(const Box& box) {
    const Peaks& weights = starts_[box.chain].weights;
    std::size_t widest = 0;
    double width_s = -1.0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double apart_s = weights[i] * (box.found->peaks[i] - box.low[i]);
      if (apart_s > width_s) {
        width_s = apart_s;
        widest = i;
      }
    }
    const double peak = box.found->peaks[widest];
    // Halves, and when they are narrow the plan's own peak and what lies below it: peaks are few.
    const bool narrow = width_s <= kNarrow * best_.cost_s;
    const double middle = narrow ? std::nextafter(peak, 0.0) : (box.low[widest] + peak) / 2;
    Peaks high = box.high;
    high[widest] = middle;
    add(box.chain, box.low, high);
    Peaks low = box.low;
    low[widest] = narrow ? peak : middle;
    push(box.chain, low, box.high, box.found);
  }

  double cost(int chain, const Peaks& peaks, double sum_s) const {
    const Start& start = starts_[chain];
    double total_s = sum_s + start.fixed_s;
    for (std::size_t i = 0; i < peaks.size(); ++i) total_s += start.weights[i] * peaks[i];
    return total_s;
  }

  const Problem& problem_;
  const std::int64_t most_steps_;
  std::vector<Start> starts_;
  std::priority_queue<Box> boxes_;
  std::int64_t numbers_ = 0;
  Solution best_;
};

}  // namespace

Solution solve(const Problem& problem, std::int64_t most_steps) {
  return Search(problem, most_steps).run();
}

}  // namespace planner::metis
