// Which way of multiplying is the fastest is measured, not guessed: once for a class of shapes.
#include <time.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "cache.h"
#include "product.h"

namespace opencl {
namespace {

constexpr int kFewestTurns = 3, kMostTurns = 30;
constexpr double kSecondsOfTurns = 0.05;  // in which short products have many
constexpr double kNever = 1e30;
constexpr double kHopeless = 4;  // times the best: a few runs have shown enough
constexpr int64_t kLongest = 4096;

// The longest of a class: 16, 32, 64, ... Within a class the same way stays the fastest.
int64_t longest_like(int64_t length) {
  int64_t most = 16;
  while (length > most && most < kLongest) most *= 2;
  return most;
}

char order(const Matrices& matrices) {
  return matrices.at.column == 1 ? 'r' : matrices.at.row == 1 ? 'c' : 's';
}

std::string class_of(const Device& device, const Product& product) {
  std::ostringstream name;
  name << name_of(device, product.dtype) << ' ' << order(product.a) << order(product.b)
       << order(product.out) << ' ' << longest_like(product.rows) << ' '
       << longest_like(product.columns) << ' ' << longest_like(product.depth)
       << (product.batches > 1 ? " batched" : "");
  return name.str();
}

// The choices of one device, as its cache file has them: a line "class: way" for each.
class Choices {
 public:
  explicit Choices(const Device& device)
      : file_("matmul-" + digest(device.name + device.driver) + ".txt") {
    read();
  }

  std::string find(const std::string& shapes) const {
    const auto found = ways_.find(shapes);
    return found == ways_.end() ? "" : found->second;
  }

  void keep(const std::string& shapes, const std::string& way) {
    read();  // what other processes have found meanwhile
    ways_[shapes] = way;
    std::string text;
    for (const auto& [known, chosen] : ways_) text += known + ": " + chosen + "\n";
    save_cached(file_, text);
  }

 private:
  void read() {
    std::istringstream lines(load_cached(file_).value_or(""));
    for (std::string line; std::getline(lines, line);) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) ways_[line.substr(0, colon)] = line.substr(colon + 2);
    }
  }

  std::string file_;
  std::map<std::string, std::string> ways_;
};

// The caller holds the device's `submitting`, which guards this too.
Choices& choices_of(const Device& device) {
  static auto* all = new std::map<const Device*, Choices>();
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  return all->try_emplace(&device, device).first->second;
}

double seconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double measure(Submission& submission, const Product& product, Way way) {
  const double begin = seconds();
  compute(submission, product, way);
  submission.stream().synchronize();
  return seconds() - begin;
}

// The least time of each way; kNever for one that the device cannot go. The ways take turns, since
// other work on the machine may slow any of them down, and the choice is kept.
std::map<Way, double> measure_all(Submission& submission, const Product& product,
                                  const std::vector<Way>& ways) {
  std::map<Way, double> times;
  double least = kNever;
  Failure refused;
  submission.stream().synchronize();
  for (const Way way : ways) {
    double& own = times.emplace(way, kNever).first->second;
    try {
      measure(submission, product, way);  // builds the programs
      own = measure(submission, product, way);
    } catch (const Failure& failure) {
      refused = failure;
    }
    least = std::min(least, own);
  }
  if (least == kNever) throw refused;
  std::erase_if(times, [](const auto& each) { return each.second == kNever; });
  const double begin = seconds();
  for (int turn = 1; turn < kMostTurns; ++turn) {
    if (turn >= kFewestTurns && seconds() - begin > kSecondsOfTurns) break;
    for (auto& [way, own] : times) {
      if (turn >= kFewestTurns && own > kHopeless * least) continue;
      own = std::min(own, measure(submission, product, way));
      least = std::min(least, own);
    }
  }
  return times;
}

}  // namespace

Way choose_way(Submission& submission, const Product& product) {
  const Device& device = submission.device();
  std::vector<Way> ways = ways_of(device, product);
  if (ways.size() == 1) return ways.front();
  Choices& choices = choices_of(device);
  const std::string shapes = class_of(device, product);
  const std::string known = choices.find(shapes);
  for (const Way way : ways) {
    if (name_of(way) == known) return way;
  }
  // Its routines take a driver long to build, so that where it was far behind once it is not tried
  // for every class of shapes.
  const std::string clblast = name_of(device, product.dtype) + " clblast";
  if (choices.find(clblast) == "hopeless") std::erase(ways, Way::clblast);
  const auto times = measure_all(submission, product, ways);
  const auto best = std::min_element(
      times.begin(), times.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const auto of_clblast = times.find(Way::clblast);
  if (of_clblast != times.end() && of_clblast->second > kHopeless * best->second) {
    choices.keep(clblast, "hopeless");
  }
  choices.keep(shapes, name_of(best->first));
  return best->first;
}

}  // namespace opencl
