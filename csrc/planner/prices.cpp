#include "prices.h"

#include <cstddef>

namespace planner {

namespace {

constexpr double kZero = 1e-9;

}  // namespace

// The tableau holds the basis' inverse and its values; there are as many rows as types of units,
// which are few, and columns are the patterns, which are many and never stored.
std::vector<double> prices(const std::vector<std::vector<int>>& patterns,
                           const std::vector<int>& everything) {
  const std::size_t types = everything.size();
  std::vector<std::vector<double>> inverse(types, std::vector<double>(types, 0.0));
  std::vector<double> values(everything.begin(), everything.end());
  std::vector<bool> counts(types, false);  // whether a row's basic variable is a pattern
  for (std::size_t t = 0; t < types; ++t) inverse[t][t] = 1.0;

  std::vector<double> price(types), column(types);
  for (std::size_t pivots = 0; pivots < 64 * types; ++pivots) {
    for (std::size_t t = 0; t < types; ++t) {
      price[t] = 0;
      for (std::size_t row = 0; row < types; ++row)
        if (counts[row]) price[t] += inverse[row][t];
    }
    // the cheapest pattern enters, or a slack whose price is negative
    const std::vector<int>* entering = nullptr;
    std::size_t slack = types;
    double least = 1.0 - kZero;
    for (const auto& pattern : patterns) {
      double cost = 0;
      for (std::size_t t = 0; t < types; ++t) cost += price[t] * pattern[t];
      if (cost < least) least = cost, entering = &pattern;
    }
    if (!entering)
      for (std::size_t t = 0; t < types && slack == types; ++t)
        if (price[t] < -kZero) slack = t;
    if (!entering && slack == types) return price;

    std::size_t leaving = types;
    for (std::size_t row = 0; row < types; ++row) {
      column[row] = 0;
      for (std::size_t t = 0; t < types; ++t)
        column[row] += inverse[row][t] * (entering ? (*entering)[t] : t == slack ? 1 : 0);
      if (column[row] > kZero &&
          (leaving == types || values[row] * column[leaving] < values[leaving] * column[row]))
        leaving = row;
    }
    if (leaving == types) return price;  // a pattern of no units: there is none
    const double pivot = column[leaving];
    for (double& x : inverse[leaving]) x /= pivot;
    values[leaving] /= pivot;
    for (std::size_t row = 0; row < types; ++row) {
      if (row == leaving) continue;
      for (std::size_t t = 0; t < types; ++t) inverse[row][t] -= column[row] * inverse[leaving][t];
      values[row] -= column[row] * values[leaving];
    }
    counts[leaving] = entering != nullptr;
  }
  return price;
}

}  // namespace planner
