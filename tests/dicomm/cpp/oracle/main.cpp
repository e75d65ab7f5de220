// Random operations against a model of what must happen.
//
//   dicomm_oracle --seed 7 --operations 1000000 --ranks 4 --transport shm [--processes]
//
// Exit code 0: everything happened as it must, and nothing was leaked.
#include <dirent.h>
#include <malloc.h>
#include <sys/wait.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string_view>

#include "core/text.h"
#include "file_store.h"
#include "oracle/rank.h"
#include "support.h"

namespace dicomm::oracle {

namespace {

constexpr std::uint64_t kWarmEpochs = 3;  // until everything that is made once is made
constexpr std::int64_t kHeapSlackBytes = 256 << 10;

struct Resources {
  std::int64_t descriptors = 0, threads = 0, segments = 0, heap_bytes = 0;

  static Resources now() {
    Resources used;
    const auto entries = [](const char* folder) {
      return std::distance(std::filesystem::directory_iterator(folder), {});
    };
    used.descriptors = entries("/proc/self/fd");
    used.threads = entries("/proc/self/task");
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
      used.segments += line.find("memfd:dicomm") != std::string::npos;
    used.heap_bytes = static_cast<std::int64_t>(mallinfo2().uordblks);
    return used;
  }

  bool within(const Resources& before) const {
    return descriptors <= before.descriptors && threads <= before.threads &&
           segments <= before.segments && heap_bytes <= before.heap_bytes + kHeapSlackBytes;
  }

  std::string describe() const {
    return text(descriptors, " descriptors, ", threads, " threads, ", segments, " segments, ",
                heap_bytes, " bytes of heap");
  }
};

// Only while no rank does anything. A joined thread vanishes from /proc a moment later.
void expect_no_leak(const Resources& before) {
  Resources used = Resources::now();
  for (int i = 0; i < 100 && !used.within(before); ++i) {
    ::usleep(20'000);
    used = Resources::now();
  }
  if (!used.within(before))
    throw Violation(text("leaked: ", used.describe(), "; before: ", before.describe()));
}

std::uint64_t operations(const Arena& arena) {
  std::uint64_t sum = 0;
  for (const RankLog& log : arena.ranks) sum += log.operations;
  return sum;
}

// Every process looks after its own resources; of threads, the first does for all.
template <class StoreType>
void run_epochs(const Settings& settings, Arena& arena, const std::shared_ptr<StoreType>& store,
                int rank, std::uint64_t& epoch) {
  const bool guards_resources = settings.processes || rank == 0;
  Resources before;
  for (epoch = 0; !arena.stop; ++epoch) {
    const Plan plan{settings, epoch};
    // On a thread of its own, with which its scratch memory goes.
    testing::run_threads(1, [&](int) { Rank(plan, arena, store, rank).run(); });
    arena.meet(settings.ranks);
    if (plan.kind() == EpochKind::orderly) check_channels(plan, arena, rank);
    arena.meet(settings.ranks);
    if (rank == 0) store->clear();  // it would grow
    if (guards_resources && epoch == kWarmEpochs) before = Resources::now();
    if (guards_resources && epoch > kWarmEpochs) expect_no_leak(before);
    if (rank == 0) arena.stop = operations(arena) >= settings.operations && epoch > kWarmEpochs;
    arena.meet(settings.ranks);
  }
}

template <class StoreType>
bool run_rank(const Settings& settings, Arena& arena, const std::shared_ptr<StoreType>& store,
              int rank) {
  std::uint64_t epoch = 0;
  try {
    run_epochs(settings, arena, store, rank, epoch);
    return true;
  } catch (const std::exception& error) {
    if (!arena.failed.exchange(true))
      std::cerr << "oracle: seed " << settings.seed << ", epoch " << epoch << ", rank " << rank
                << ": " << error.what() << std::endl;
    return false;
  }
}

bool run_as_processes(const Settings& settings, Arena& arena) {
  const testing::TemporaryFolder folder;
  std::vector<pid_t> children;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto store = std::make_shared<testing::FileStore>(folder.path());
      const bool good = run_rank(settings, arena, store, rank);
      std::cerr.flush();
      std::quick_exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) {
      good = false;
      arena.failed = true;
    }
  }
  return good;
}

bool run_as_threads(const Settings& settings, Arena& arena) {
  const auto store = std::make_shared<MemoryStore>();
  std::atomic<bool> good{true};
  testing::run_threads(settings.ranks, [&](int rank) {
    if (!run_rank(settings, arena, store, rank)) good = false;
  });
  return good;
}

std::uint64_t number(std::string_view option, std::string_view value) {
  std::uint64_t result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc{} || end != value.data() + value.size())
    throw Error(text(option, " ", value, ": expected a number"));
  return result;
}

Settings settings_from(int count, char** words) {
  Settings settings;
  for (int i = 1; i < count; ++i) {
    const std::string_view option = words[i];
    if (option == "--processes") {
      settings.processes = true;
      continue;
    }
    if (i + 1 == count) throw Error(text(option, ": expected a value behind it"));
    const std::string_view value = words[++i];
    if (option == "--seed")
      settings.seed = number(option, value);
    else if (option == "--operations")
      settings.operations = number(option, value);
    else if (option == "--ranks")
      settings.ranks = static_cast<int>(number(option, value));
    else if (option == "--transport")
      settings.transport = known_transport(std::string(value));
    else
      throw Error(
          text(option, ": expected --seed, --operations, --ranks, --transport, --processes"));
  }
  if (settings.ranks < 2 || settings.ranks > kMaxRanks)
    throw Error(text("--ranks ", settings.ranks, ": expected 2 to ", kMaxRanks));
  return settings;
}

int run(const Settings& settings) {
  Arena& arena = Arena::create();
  const bool good =
      settings.processes ? run_as_processes(settings, arena) : run_as_threads(settings, arena);
  std::cout << "seed " << settings.seed << ": " << operations(arena) << " operations of "
            << settings.ranks << (settings.processes ? " processes: " : " threads: ")
            << (good ? "as they must be" : "WRONG") << std::endl;
  return good ? 0 : 1;
}

}  // namespace

}  // namespace dicomm::oracle

int main(int count, char** words) {
  try {
    return dicomm::oracle::run(dicomm::oracle::settings_from(count, words));
  } catch (const std::exception& error) {
    std::cerr << "oracle: " << error.what() << '\n';
    return 2;
  }
}
