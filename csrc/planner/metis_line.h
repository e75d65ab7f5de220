// The chips in one order of their types, and the stages that may stand on them.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "metis.h"

namespace planner::metis {

// What a stage on some chips costs as a function of its layers.
struct Group {
  double between_s = 0.0;         // of a micro-batch
  double update_s = 0.0;          // of a layer
  double gradients_s = 0.0;       // of a byte of parameters
  double activation_bytes = 0.0;  // of a replica's share of a micro-batch
  std::vector<double> seconds;    // of layers [first, last), by first x (layers + 1) + last
  std::vector<int> longest;       // by first layer, where the layers must end for memory
};

struct Option {
  int chips = 0;
  int tp = 0;
  int group = 0;
  int entry = 0;  // at its first chip: what the stage before needs to know of it
};

// How a stage before sees the stages from a chip on: by the bandwidth towards them.
struct Entry {
  bool inside = false;  // they end within the node of their first chip
  double inter_bytes_per_s = 0.0;
  bool operator==(const Entry&) const = default;
};

// One order of the types with one number of micro-batches.
class Line {
 public:
  Line(const Problem& problem, int order, int micro_batches);

  int chips() const { return static_cast<int>(types_.size()); }
  const std::vector<Option>& options(int chip) const { return options_[chip]; }
  const std::vector<Entry>& entries(int chip) const { return entries_[chip]; }
  const Group& group(int index) const { return groups_[index]; }
  int groups() const { return static_cast<int>(groups_.size()); }
  // Of the slowest link among the chips of a stage [first, last) and those of the next.
  double bandwidth(int first, int last, const Entry& next) const;

 private:
  void add_options(int chip);
  int find_group(int first, int chips, int tp);
  bool make_group(int first, int chips, int tp, double across, Group& group) const;
  bool share_out(int first, int dp, int tp, std::vector<int>& shares) const;
  bool make_profile(int type, int tp, int share, Profile& profile) const;
  double bandwidth(int first, int last) const;
  double across(int first, int dp, int tp) const;

  const Problem& problem_;
  int micro_batch_;
  std::vector<int> types_;  // by chip
  std::vector<int> nodes_;
  std::vector<std::vector<Option>> options_;
  std::vector<std::vector<Entry>> entries_;
  std::vector<Group> groups_;
  std::map<std::vector<double>, int> known_;  // groups by what they depend on; -1: none
};

}  // namespace planner::metis
