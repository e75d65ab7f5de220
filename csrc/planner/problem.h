// A pipeline to be found, as a chain of stages over chip types (H2, section 4.3.1).
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace planner {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// fixed + n per_layer, for n layers.
struct Line {
  double fixed = 0.0;
  double per_layer = 0.0;
};

// Bytes with n layers and m micro-batches in flight:
// fixed + n per_layer + (m - 1) (kept + n kept_per_layer).
struct Plane {
  double fixed = 0.0;
  double per_layer = 0.0;
  double kept = 0.0;
  double kept_per_layer = 0.0;
};

// Bytes of a rank with a micro-batch at work.
struct Working {
  Plane plane;                   // without boundary tensors
  std::vector<double> boundary;  // of those, by micro-batches not in flight; the last for more
};

// What a stage costs; each is the largest of its lines, and memory the larger of working and alone.
struct Cost {
  std::vector<Line> time_s;                       // T of section 4.3.2, of a micro-batch
  std::vector<Line> update_s;                     // U of section 4.3.2, of a step
  std::vector<Working> working;                   // of unlike ranks, of which each has to fit
  std::vector<Line> alone;                        // of the update, or of one micro-batch
  std::vector<std::array<double, 2>> measured_s;  // T and U by layers, where no line tells them
};

// Stages differ by whether they embed and whether they end in the loss.
constexpr int kKinds = 4;
inline int kind_of(bool first, bool last) { return 2 * first + last; }

// One way to run a stage on chips of one type.
struct Choice {
  int chips = 0;                                // of the stage
  int align = 1;                                // its first chip is a multiple of this
  std::vector<std::array<Cost, kKinds>> costs;  // by place, then kind; what cannot be is empty
  std::vector<std::uint8_t> places;             // by first chip / align, over and over
};

// The stages of one chip type all choose from one lane.
struct Lane {
  std::vector<int> choices;
  bool alike = true;  // all its stages hold the same number of layers
};

struct ChipType {
  int chips = 0;  // all of them are used
  double capacity_bytes = 0.0;
  std::vector<Choice> choices;
  std::vector<Lane> lanes;
};

struct Problem {
  int layers = 0;
  double micro_batches = 0.0;
  double alpha = 0.0;             // bubble coefficient
  std::vector<double> in_flight;  // micro-batches that a stage holds, by stages after it
  int stages = 0;                 // so many; 0: any number, at most in_flight.size()
  std::vector<ChipType> types;    // in pipeline order
};

// A stage's cost for every number of layers, as the search looks it up.
struct Table {
  std::vector<double> time_s;        // T, by layers
  std::vector<double> bottleneck_s;  // (b - alpha) T + U, by layers
  std::vector<int> most_layers;      // that fit, by stages after it
};

Table tabulate(const Problem& problem, const Cost& cost, double capacity_bytes);

// Least and most stages that use up a number of chips exactly, for one lane.
class Reach {
 public:
  Reach(const ChipType& type, const Lane& lane);
  bool possible(int chips) const { return chips % unit_ == 0 && most(chips) >= 0; }
  int least(int chips) const { return least_[static_cast<std::size_t>(chips / unit_)]; }
  int most(int chips) const { return most_[static_cast<std::size_t>(chips / unit_)]; }

 private:
  int unit_;  // every stage's chips are a multiple of it
  std::vector<int> least_, most_;
};

}  // namespace planner
