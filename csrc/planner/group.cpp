#include "group.h"

#include <algorithm>

namespace planner {
namespace {

std::size_t size(int value) { return static_cast<std::size_t>(value); }

void tabulate_all(const Problem& problem, Group& group) {
  for (const Choice& choice : group.type->choices) {
    auto& places = group.tables.emplace_back();
    for (const auto& costs : choice.costs) {
      auto& tables = places.emplace_back();
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        tables[kind] = tabulate(problem, costs[kind], group.type->capacity_bytes);
      }
    }
  }
}

// The least of everything over a track's choices, with at least so many stages after each.
void measure(const Group& group, Track& track, int after) {
  for (int index : track.lane->choices) {
    const double chips = group.type->choices[size(index)].chips;
    for (const auto& tables : group.tables[size(index)]) {
      for (const Table& table : tables) {
        const int most = std::min(track.most_layers, table.most_layers[size(after)]);
        for (int n = track.least_layers; n <= most; ++n) {
          track.stage_s = std::min(track.stage_s, table.time_s[size(n)]);
          track.bottleneck_s = std::min(track.bottleneck_s, table.bottleneck_s[size(n)]);
          track.layer_s = std::min(track.layer_s, table.time_s[size(n)] / n);
          track.chip_s = std::min(track.chip_s, table.bottleneck_s[size(n)] * chips / n);
        }
      }
    }
  }
}

void add_tracks(const Problem& problem, Group& group, int after) {
  for (const Lane& lane : group.type->lanes) {
    const auto reach = std::make_shared<const Reach>(*group.type, lane);
    if (!reach->possible(group.type->chips)) continue;
    const int stages = lane.alike ? reach->least(group.type->chips) : 1;
    for (int n = 1; n * stages <= problem.layers; ++n) {
      Track track;
      track.lane = &lane;
      track.reach = reach;
      track.least_layers = n;
      track.most_layers = lane.alike ? n : problem.layers;
      measure(group, track, after);
      if (track.stage_s < kInfinity) group.tracks.push_back(std::move(track));
      if (!lane.alike) break;
    }
  }
}

// The least that this type alone costs with so many layers.
void bound_alone(const Problem& problem, Group& group, int longest) {
  const int chips = group.type->chips;
  group.sum_s.assign(size(problem.layers) + 1, kInfinity);
  group.bottleneck_s = group.sum_s;
  for (const Track& track : group.tracks) {
    const int least = track.reach->least(chips);
    const int most = std::min(track.reach->most(chips), longest);
    const double layer_s = track.chip_s / chips;  // of bottleneck, in perfect balance
    const auto offer = [&](int layers, double sum_s) {
      const double bottleneck_s = std::max(track.bottleneck_s, layers * layer_s);
      group.sum_s[size(layers)] = std::min(group.sum_s[size(layers)], sum_s);
      group.bottleneck_s[size(layers)] = std::min(group.bottleneck_s[size(layers)], bottleneck_s);
    };
    if (track.lane->alike) {
      for (int k = least; k <= most && k * track.least_layers <= problem.layers; ++k) {
        offer(k * track.least_layers, k * track.stage_s);
      }
    } else {
      for (int layers = least; layers <= problem.layers; ++layers) {
        offer(layers, std::max(layers * track.layer_s, least * track.stage_s));
      }
    }
  }
}

void add_earlier(const Problem& problem, Group& group, const Group& earlier) {
  group.least_stages += earlier.least_stages;
  group.least_layers += earlier.least_layers;
  std::vector<double> sum_s(group.sum_s.size(), kInfinity), bottleneck_s = sum_s;
  for (int own = 1; own <= problem.layers; ++own) {
    if (group.sum_s[size(own)] == kInfinity) continue;
    for (int other = 1; own + other <= problem.layers; ++other) {
      const auto at = size(own + other);
      sum_s[at] = std::min(sum_s[at], group.sum_s[size(own)] + earlier.sum_s[size(other)]);
      bottleneck_s[at] = std::min(bottleneck_s[at], std::max(group.bottleneck_s[size(own)],
                                                             earlier.bottleneck_s[size(other)]));
    }
  }
  group.sum_s = std::move(sum_s);
  group.bottleneck_s = std::move(bottleneck_s);
}

}  // namespace

std::vector<Group> make_groups(const Problem& problem, int longest) {
  std::vector<Group> groups;
  const int types = static_cast<int>(problem.types.size());
  for (int index = 0; index < types; ++index) {
    Group group;
    group.type = &problem.types[size(index)];
    tabulate_all(problem, group);
    add_tracks(problem, group, types - 1 - index);
    group.least_stages = longest + 1;
    group.least_layers = problem.layers + 1;
    for (const Track& track : group.tracks) {
      const int least = track.reach->least(group.type->chips);
      group.least_stages = std::min(group.least_stages, least);
      group.least_layers = std::min(group.least_layers, least * track.least_layers);
    }
    bound_alone(problem, group, longest);
    const Group* earlier = groups.empty() ? nullptr : &groups.back();
    if (earlier != nullptr) add_earlier(problem, group, *earlier);
    groups.push_back(std::move(group));
  }
  return groups;
}

double least_cost_s(const Problem& problem, const std::vector<Group>& groups) {
  const auto layers = size(problem.layers);
  return groups.back().bottleneck_s[layers] + problem.alpha * groups.back().sum_s[layers];
}

bool cut_layers(const Problem& problem, std::vector<Group>& groups, double limit_s) {
  // what the least sum of T leaves; a stage's bottleneck grows with its layers
  const double most_s = limit_s - problem.alpha * groups.back().sum_s[size(problem.layers)];
  bool cut = false;
  for (Group& group : groups) {
    const auto slow = [&](const Track& track) { return track.bottleneck_s > most_s; };
    cut |= std::erase_if(group.tracks, slow) > 0;
    for (auto& places : group.tables) {
      for (auto& tables : places) {
        for (Table& table : tables) {
          int most = problem.layers;
          while (most > 0 && table.bottleneck_s[size(most)] > most_s) --most;
          for (int& layers : table.most_layers) {
            cut |= layers > most;
            layers = std::min(layers, most);
          }
        }
      }
    }
  }
  return cut;
}

}  // namespace planner
