// dicomm-collectives: times libdicomm's collectives between processes of this host.
//
//   dicomm-collectives RANKS [TRANSPORT]
//
// starts the other ranks, says "ready", reads an order a line, "COLLECTIVE BYTES 1 COUNT", and
// answers each with the median and the 99th percentile of one call in us. BYTES: of the float32
// vector that the whole group works on. dicomm-bench drives it, beside Gloo and MPI.
#include "collective/collectives.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "bench/file_store.h"
#include "bench/forked_ranks.h"
#include "core/huge_pages.h"

namespace dicomm::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::hours kTimeout(1);  // between orders others are measured

struct Order {
  char collective[32] = {};  // empty: the end
  std::uint64_t bytes = 0, window = 0, count = 0;
};

// Page-aligned and in huge pages, as the vectors of the others that dicomm-bench measures are.
template <class T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::align_val_t kPage{4096};

  PageAllocator() = default;
  template <class U>
  PageAllocator(const PageAllocator<U>&) {}
  T* allocate(std::size_t count) {
    void* const memory = ::operator new(count * sizeof(T), kPage);
    prefer_huge_pages(memory, count * sizeof(T));
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, kPage); }
  bool operator==(const PageAllocator&) const = default;
};

// The vectors of one order, and every collective on them.
class Subject {
 public:
  Subject(Group& group, std::size_t bytes)
      : group_(group),
        part_((bytes + sizeof(float) * group.size() - 1) / (sizeof(float) * group.size())),
        whole_(part_ * group.size()),
        other_(whole_.size()) {
    for (int rank = 0; rank < group.size(); ++rank) {
      whole_parts_.push_back({whole_.data() + rank * part_, part_bytes()});
      other_parts_.push_back({other_.data() + rank * part_, part_bytes()});
    }
  }

  // One call, or one for each rank as the root, so that no root runs ahead of the others: how many
  // calls it was, 0 for an unknown collective.
  int run(const std::string& collective) {
    if (const auto call = rootless_.find(collective); call != rootless_.end()) {
      (this->*call->second)();
      return 1;
    }
    const auto call = rooted_.find(collective);
    if (call == rooted_.end()) return 0;
    for (int root = 0; root < group_.size(); ++root) (this->*call->second)(root);
    return group_.size();
  }

 private:
  using Rootless = void (Subject::*)();
  using Rooted = void (Subject::*)(int root);

  std::size_t part_bytes() const { return part_ * sizeof(float); }
  std::size_t whole_bytes() const { return whole_.size() * sizeof(float); }
  Call call() { return {group_.next_tag()}; }

  void all_reduce() {
    allreduce(group_, whole_.data(), whole_.size(), DataType::float32, ReduceOp::sum, call());
  }
  void all_gather() { allgather(group_, {whole_.data(), part_bytes()}, other_parts_, call()); }
  void scatter_reduced() {
    reduce_scatter(group_, whole_parts_, {other_.data(), part_bytes()}, DataType::float32,
                   ReduceOp::sum, call());
  }
  void all_to_all() { alltoall_even(group_, whole_.data(), other_.data(), part_bytes(), call()); }
  void meet() { barrier(group_, call()); }
  void spread(int root) { broadcast(group_, whole_.data(), whole_bytes(), root, call()); }
  void reduce_to(int root) {
    reduce(group_, whole_.data(), whole_.data(), whole_.size(), DataType::float32, ReduceOp::sum,
           root, call());
  }
  void gather_at(int root) {
    gather_even(group_, whole_.data(), other_.data(), part_bytes(), root, call());
  }
  void scatter_from(int root) {
    scatter_even(group_, other_.data(), whole_.data(), part_bytes(), root, call());
  }

  inline static const std::map<std::string, Rootless> rootless_{
      {"allreduce", &Subject::all_reduce},
      {"allgather", &Subject::all_gather},
      {"reduce_scatter", &Subject::scatter_reduced},
      {"alltoall", &Subject::all_to_all},
      {"barrier", &Subject::meet}};
  inline static const std::map<std::string, Rooted> rooted_{{"broadcast", &Subject::spread},
                                                            {"reduce", &Subject::reduce_to},
                                                            {"gather", &Subject::gather_at},
                                                            {"scatter", &Subject::scatter_from}};

  Group& group_;
  std::size_t part_;
  std::vector<float, PageAllocator<float>> whole_, other_;
  std::vector<ConstBlock> whole_parts_;
  std::vector<Block> other_parts_;
};

// Rank 0's answer.
std::string perform(Group& group, const Order& order) {
  Subject subject(group, order.bytes);
  const std::string collective = order.collective;
  for (std::uint64_t i = 0; i < order.count / 10 + 1; ++i)
    if (subject.run(collective) == 0) return "dicomm has no collective " + collective;
  std::vector<double> times_us(order.count);
  auto before = Clock::now();
  for (double& time_us : times_us) {
    const int calls = subject.run(collective);
    const auto after = Clock::now();
    time_us = std::chrono::duration<double, std::micro>(after - before).count() / calls;
    before = after;
  }
  std::sort(times_us.begin(), times_us.end());
  std::ostringstream answer;
  answer << times_us[times_us.size() / 2] << ' ' << times_us[(times_us.size() * 99 - 1) / 100];
  return answer.str();
}

Order next_order() {
  Order order;
  std::string line, name;
  if (!std::getline(std::cin, line)) return order;
  std::istringstream(line) >> name >> order.bytes >> order.window >> order.count;
  order.count = std::max<std::uint64_t>(order.count, 1);
  name.copy(order.collective, sizeof order.collective - 1);
  return order;
}

void run_rank(const Options& options, const std::filesystem::path& folder) {
  Group group(Communicator::create(std::make_shared<FileStore>(folder), options));
  barrier(group, {group.next_tag()});
  if (options.rank == 0) std::cout << "ready" << std::endl;
  while (true) {
    Order order;
    if (options.rank == 0) order = next_order();
    broadcast(group, &order, sizeof order, 0, {group.next_tag(), 0, kTimeout});
    if (order.collective[0] == 0) break;
    const std::string answer = perform(group, order);
    if (options.rank == 0) std::cout << answer << std::endl;
  }
  group.communicator().close();
}

}  // namespace

}  // namespace dicomm::bench

int main(int count, char** words) {
  const std::vector<std::string> transports = dicomm::transport_names();
  const int ranks = count > 1 ? std::atoi(words[1]) : 0;
  const auto transport =
      std::find(transports.begin(), transports.end(), count > 2 ? words[2] : dicomm::kAnyTransport);
  if (ranks < 1 || ranks > 1024 || transport == transports.end()) {
    std::fprintf(stderr, "usage: dicomm-collectives RANKS [TRANSPORT]\n");
    return 2;
  }
  try {
    return dicomm::bench::run_forked("dicomm-collectives", ranks, *transport,
                                     dicomm::bench::run_rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dicomm-collectives: %s\n", error.what());
    return 1;
  }
}
