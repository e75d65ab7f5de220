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

constexpr int kRuns = 3;
constexpr double kNever = 1e30;
constexpr double kHopeless = 4;  // times the best so far: one run has shown enough

// 1 up to 16, 2 up to 64, 3 up to 256, ...: within a class the same way stays the fastest.
int magnitude(int64_t length) {
  int found = 0;
  for (int64_t most = 16; length > most && found < 5; most *= 4) ++found;
  return found;
}

char order(const Matrices& matrices) {
  return matrices.at.column == 1 ? 'r' : matrices.at.row == 1 ? 'c' : 's';
}

std::string class_of(const Device& device, const Product& product) {
  std::ostringstream name;
  name << name_of(device, product.dtype) << ' ' << order(product.a) << order(product.b)
       << order(product.out) << ' ' << magnitude(product.rows) << ' ' << magnitude(product.columns)
       << ' ' << magnitude(product.depth) << (product.batches > 1 ? " batched" : "");
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

// The least time of each way; kNever for one that the device cannot go.
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
      for (int run = 1; run < kRuns && own < kHopeless * least; ++run) {
        own = std::min(own, measure(submission, product, way));
      }
    } catch (const Failure& failure) {
      refused = failure;
    }
    least = std::min(least, own);
  }
  if (least == kNever) throw refused;
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
