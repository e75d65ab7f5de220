// dicomm-scale: what a job's ranks and groups cost, with ranks that train nothing.
//
//   dicomm-scale RANKS GROUPS [TRANSPORT]
//
// starts the ranks on this host. They make a communicator, and meet in a barrier ("first"); then
// every two of them exchange a message ("mesh"), so that all are connected; then they make GROUPS
// groups of all of them, and meet in a barrier of each ("groups"). It prints, a line each, what the
// rank that has the most has after each of these: "PHASE WHAT VALUE".
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/file_store.h"
#include "collective/collectives.h"

namespace dicomm::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBarriers = 30;

// Counts what is asked of it; a wait is one request.
class CountingStore final : public Store {
 public:
  explicit CountingStore(const std::filesystem::path& folder) : files_(folder) {}

  void set(const std::string& key, const std::string& value) override {
    ++requests_;
    files_.set(key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const std::string value = files_.get(key, timeout);
    ++requests_;
    return value;
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

// The segments that it shares with others: memory is taken for all of each, used or not.
double shared_mib() {
  std::ifstream maps("/proc/self/maps");
  double bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t from = 0, to = 0;
    if (line.find("/memfd:dicomm") != line.npos &&
        std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &from, &to) == 2)
      bytes += static_cast<double>(to - from);
  }
  return bytes / (1 << 20);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Rank {
 public:
  Rank(const Options& options, const std::filesystem::path& folder)
      : options_(options),
        store_(std::make_shared<CountingStore>(folder)),
        start_(Clock::now()),
        world_(Communicator::create(store_, options)),
        all_(world_) {}

  void run(int groups) {
    meet(all_);
    report("first");
    connect();
    report("mesh");
    for (int i = 0; i < groups; ++i) {
      made_.push_back(make_group(i));
      all_of_made_.push_back(std::make_unique<Group>(made_.back()));
      meet(*all_of_made_.back());
    }
    report("groups");
    for (const auto& group : made_) group->close();
    world_->close();
  }

 private:
  static void meet(Group& group) { barrier(group, {group.next_tag()}); }

  std::shared_ptr<Communicator> make_group(int number) {
    Options options = options_;
    options.name = "group " + std::to_string(number);
    std::vector<int> ranks(options.world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
    return world_->subgroup(store_, options, ranks);
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

  // Says the largest of all ranks' figures.
  void report(const char* phase) {
    constexpr const char* names[] = {"seconds",      "store requests", "threads",   "descriptors",
                                     "resident MiB", "shared MiB",     "barrier us"};
    const double seconds = seconds_since(start_);
    meet(all_);  // threads that connected ranks have ended
    double figures[] = {seconds,
                        static_cast<double>(store_->requests()),
                        entries("/proc/self/task"),
                        entries("/proc/self/fd") - 1,  // that of the folder itself
                        resident_mib(),
                        shared_mib(),
                        barrier_us()};
    allreduce(all_, figures, std::size(figures), DataType::float64, ReduceOp::max,
              {all_.next_tag()});
    for (std::size_t i = 0; options_.rank == 0 && i < std::size(figures); ++i)
      std::printf("%s %.6g %s\n", phase, figures[i], names[i]);
    start_ = Clock::now();
  }

  const Options options_;
  const std::shared_ptr<CountingStore> store_;
  Clock::time_point start_;  // of the phase
  const std::shared_ptr<Communicator> world_;
  Group all_;
  std::vector<std::shared_ptr<Communicator>> made_;
  std::vector<std::unique_ptr<Group>> all_of_made_;
};

std::string random_secret() {
  std::random_device random;
  return std::to_string(random()) + std::to_string(random()) + std::to_string(random());
}

// The rank that this process is, once all are forked.
int start_others(int ranks) {
  for (int rank = 1; rank < ranks; ++rank)
    if (::fork() == 0) return rank;
  return 0;
}

int run(int ranks, int groups, const std::string& transport) {
  std::string folder = (std::filesystem::temp_directory_path() / "dicomm-XXXXXX").string();
  if (!::mkdtemp(folder.data())) throw Error("cannot make a folder " + folder);
  Options options;
  options.world_size = ranks;
  options.secret = random_secret();
  options.transport = transport;
  options.listen_address = "127.0.0.1";
  options.rank = start_others(ranks);
  int status = 0;
  try {
    Rank(options, folder).run(groups);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dicomm-scale: rank %d: %s\n", options.rank, error.what());
    status = 1;
  }
  if (options.rank != 0) ::_exit(status);
  for (int ended = 0; ::wait(&ended) > 0;) status |= ended != 0;
  std::filesystem::remove_all(folder);
  return status;
}

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
    return dicomm::bench::run(ranks, groups, *transport);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dicomm-scale: %s\n", error.what());
    return 1;
  }
}
