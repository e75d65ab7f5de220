// dicomm-scale: what a job's ranks and groups cost, with ranks that train nothing.
//
//   dicomm-scale RANKS GROUPS [TRANSPORT]
//
// starts the ranks on this host. They make a communicator, and meet in a barrier ("first"); then
// they make the groups of a training plan and use each as training does ("plan"), and once more
// ("step"). With GROUPS above 0 every two of them then exchange a message ("mesh"), so that all are
// connected; then they make GROUPS groups of all of them, and meet in a barrier of each ("groups").
// It prints, a line each, what the rank that has the most has after each of these: "PHASE VALUE
// WHAT"; of the requests of the store the mean of all ranks, too. Requests and CPU seconds count
// from the start, seconds from the end of the phase before.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "bench/file_store.h"
#include "bench/forked_ranks.h"
#include "collective/collectives.h"

namespace dicomm::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBarriers = 30;
constexpr std::size_t kGradients = 256 << 10;  // float32 numbers, as the next
constexpr std::size_t kActivations = 64 << 10;
constexpr std::size_t kNorm = 1;

// Counts what is asked of it; a wait is one request.
class CountingStore final : public Store {
 public:
  explicit CountingStore(const std::filesystem::path& folder) : files_(folder) {}

  void set(const std::string& key, const std::string& value) override {
    ++requests_;
    files_.set(key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    ++requests_;
    return files_.get(key, timeout);
  }
  int requests() const { return requests_; }

 private:
  FileStore files_;
  std::atomic<int> requests_{0};
};

double entries(const char* folder) {
  return static_cast<double>(std::distance(std::filesystem::directory_iterator(folder),
                                           std::filesystem::directory_iterator()));
}

double resident_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (double kib = 0; word == "VmRSS:" && status >> kib) return kib / 1024;
  return 0;
}

// What it uses of the segments that it shares with others.
double shared_mib() {
  std::ifstream maps("/proc/self/smaps");
  bool is_segment = false;
  double kib = 0;
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t from = 0;
    if (char dash = 0; std::sscanf(line.c_str(), "%" SCNx64 "%c", &from, &dash) == 2 && dash == '-')
      is_segment = line.find("/memfd:dicomm") != line.npos;
    if (double used = 0; is_segment && std::sscanf(line.c_str(), "Rss: %lf", &used) == 1)
      kib += used;
  }
  return kib / 1024;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double cpu_seconds_since(std::clock_t start) {
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// Whom a rank works with in a plan of one pipeline of two stages: up to 8 neighbours in tensor
// parallelism, and all else data parallel, which is more than plans have that fit as many chips.
class Place {
 public:
  Place(int rank, int ranks) {
    int tp = 8;
    while (ranks % tp != 0) tp /= 2;
    const int stage_ranks = ranks % (2 * tp) == 0 ? ranks / 2 : ranks;
    const int stage = rank / stage_ranks;
    for (int i = 0; i < tp; ++i) tensor_parallel.push_back(rank / tp * tp + i);
    for (int other = rank % tp; other < stage_ranks; other += tp)
      data_parallel.push_back(stage * stage_ranks + other);
    if (stage_ranks < ranks) neighbour = (rank + stage_ranks) % ranks;
  }

  std::vector<int> tensor_parallel, data_parallel;
  int neighbour = -1;  // in the other stage; -1: there is none
};

class Rank {
 public:
  Rank(const Options& options, const std::filesystem::path& folder)
      : options_(options),
        store_(std::make_shared<CountingStore>(folder)),
        start_(Clock::now()),
        world_(Communicator::create(store_, options)),
        all_(world_),
        place_(options.rank, options.world_size) {}

  void run(int groups) {
    meet(all_);
    report("first");
    make_plans_groups();
    step();
    report("plan");
    step();
    report("step");
    if (groups > 0) make_groups(groups);
    for (const auto& group : made_) group->close();
    world_->close();
  }

 private:
  static void meet(Group& group) { barrier(group, {group.next_tag()}); }

  void make_groups(int groups) {
    connect();
    report("mesh");
    std::vector<int> ranks(options_.world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int i = 0; i < groups; ++i) meet(make_group("group " + std::to_string(i), ranks));
    report("groups");
  }

  Group& make_group(const std::string& name, const std::vector<int>& ranks) {
    Options options = options_;
    options.name = name;
    options.world_size = static_cast<int>(ranks.size());
    options.rank = static_cast<int>(std::ranges::find(ranks, options_.rank) - ranks.begin());
    made_.push_back(world_->subgroup(store_, options, ranks));
    return *all_of_made_.emplace_back(std::make_unique<Group>(made_.back()));
  }

  void make_plans_groups() {
    const auto make = [&](const char* kind, const std::vector<int>& ranks) {
      return &make_group(kind + std::to_string(ranks.front()), ranks);
    };
    tensor_parallel_ = make("tensor parallel ", place_.tensor_parallel);
    data_parallel_ = make("data parallel ", place_.data_parallel);
  }

  // The communication of a training step, each kind of it once.
  void step() {
    sum(*tensor_parallel_, kActivations);
    if (place_.neighbour >= 0) exchange_activations(place_.neighbour);
    sum(*data_parallel_, kGradients);
    sum(all_, kNorm);
  }

  static void sum(Group& group, std::size_t count) {
    std::vector<float> numbers(count, 1);
    allreduce(group, numbers.data(), count, DataType::float32, ReduceOp::sum, {group.next_tag()});
    if (numbers.back() != static_cast<float>(group.size())) throw Error("a sum is wrong");
  }

  void exchange_activations(int peer) {
    const std::vector<float> own(kActivations);
    std::vector<float> theirs(kActivations);
    const auto received = world_->irecv(theirs.data(), sizeof(float) * theirs.size(), peer, 1);
    world_->isend(own.data(), sizeof(float) * own.size(), peer, 1)->wait();
    received->wait();
  }

  void connect() {
    std::vector<std::shared_ptr<Request>> messages;
    for (int peer = 0; peer < options_.world_size; ++peer) {
      if (peer == options_.rank) continue;
      messages.push_back(world_->isend(nullptr, 0, peer, 1));
      messages.push_back(world_->irecv(nullptr, 0, peer, 1));
    }
    for (const auto& message : messages) message->wait();
  }

  double barrier_us() {
    meet(all_);
    std::array<double, kBarriers> times;
    for (double& time : times) {
      const auto before = Clock::now();
      meet(all_);
      time = 1e6 * seconds_since(before);
    }
    std::ranges::nth_element(times, times.begin() + kBarriers / 2);
    return times[kBarriers / 2];
  }

  // Says the largest of all ranks' figures, and the mean of what loads the store.
  void report(const char* phase) {
    constexpr const char* names[] = {"seconds",     "cpu seconds",  "store requests", "threads",
                                     "descriptors", "resident MiB", "shared MiB",     "barrier us"};
    const double seconds = seconds_since(start_), cpu = cpu_seconds_since(cpu_start_);
    meet(all_);  // threads that connected ranks have ended
    double figures[] = {seconds,
                        cpu,
                        static_cast<double>(store_->requests()),
                        entries("/proc/self/task"),
                        entries("/proc/self/fd") - 1,  // that of the folder itself
                        resident_mib(),
                        shared_mib(),
                        barrier_us()};
    double mean = store_->requests();
    const auto over_all = [&](double* numbers, std::size_t count, ReduceOp op) {
      allreduce(all_, numbers, count, DataType::float64, op, {all_.next_tag()});
    };
    over_all(figures, std::size(figures), ReduceOp::max);
    over_all(&mean, 1, ReduceOp::avg);
    for (std::size_t i = 0; options_.rank == 0 && i < std::size(figures); ++i)
      std::printf("%s %.6g %s\n", phase, figures[i], names[i]);
    if (options_.rank == 0) std::printf("%s %.6g mean store requests\n", phase, mean);
    start_ = Clock::now();
  }

  const Options options_;
  const std::shared_ptr<CountingStore> store_;
  Clock::time_point start_;  // of the phase
  const std::clock_t cpu_start_ = std::clock();
  const std::shared_ptr<Communicator> world_;
  Group all_;
  const Place place_;
  Group *tensor_parallel_ = nullptr, *data_parallel_ = nullptr;
  std::vector<std::shared_ptr<Communicator>> made_;
  std::vector<std::unique_ptr<Group>> all_of_made_;
};

}  // namespace

}  // namespace dicomm::bench

int main(int count, char** words) {
  const std::vector<std::string> transports = dicomm::transport_names();
  const int ranks = count > 1 ? std::atoi(words[1]) : 0;
  const int groups = count > 2 ? std::atoi(words[2]) : -1;
  const auto transport =
      std::find(transports.begin(), transports.end(), count > 3 ? words[3] : dicomm::kAnyTransport);
  if (ranks < 2 || ranks > 1024 || groups < 0 || transport == transports.end()) {
    std::fprintf(stderr, "usage: dicomm-scale RANKS GROUPS [TRANSPORT]\n");
    return 2;
  }
  try {
    const auto run_rank = [&](const dicomm::Options& options, const std::filesystem::path& store) {
      dicomm::bench::Rank(options, store).run(groups);
    };
    return dicomm::bench::run_forked("dicomm-scale", ranks, *transport, run_rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dicomm-scale: %s\n", error.what());
    return 1;
  }
}
