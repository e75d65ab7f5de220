// dicomm-perf: latency and bandwidth of libdicomm's C++ API between pairs of ranks.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bench/file_store.h"
#include "bench/options.h"
#include "core/communicator.h"
#include "core/huge_pages.h"

namespace dicomm::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kProbes = 8;  // rounds that warm up and tell how many fit
constexpr std::size_t kMostRounds = 1'000'000;
enum Tag : std::uint64_t { ping_tag, pong_tag, count_tag };

// Of a counter that is cheap to read, where there is one: some machines' clock is a system call.
std::uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return Clock::now().time_since_epoch().count();
#endif
}

class Buffer {
 public:
  Buffer(std::size_t bytes, std::size_t offset)
      : memory_(std::aligned_alloc(kPage, (bytes + offset + kPage) / kPage * kPage), std::free),
        data_(static_cast<std::byte*>(memory_.get()) + offset) {
    if (!memory_) throw Error("not enough memory for the buffers");
    prefer_huge_pages(memory_.get(), offset + bytes);  // as every contestant of dicomm-bench
    std::fill_n(data_, bytes, std::byte{1});           // the pages exist from here on
  }
  std::byte* data() { return data_; }

 private:
  std::unique_ptr<void, void (*)(void*)> memory_;
  std::byte* data_;
};

// One rank's end of a pair. The even rank keeps the time and says how many rounds there are.
class End {
 public:
  End(Communicator& communicator, const Arguments& arguments)
      : communicator_(communicator),
        arguments_(arguments),
        peer_(communicator.rank() ^ 1),
        timing_(communicator.rank() % 2 == 0) {}

  void measure(std::size_t bytes) {
    Buffer out(bytes, arguments_.offset_bytes), in(bytes, arguments_.offset_bytes);
    const auto probes = rounds(kProbes, out.data(), in.data(), bytes);
    std::uint64_t count = arguments_.iterations;
    if (timing_) {
      if (count == 0)
        count = std::clamp<std::size_t>(arguments_.seconds * 1e6 / median(probes), 5, kMostRounds);
      communicator_.send(&count, sizeof count, peer_, count_tag);
    } else {
      communicator_.recv(&count, sizeof count, peer_, count_tag);
    }
    report(bytes, rounds(count, out.data(), in.data(), bytes));
  }

 private:
  // Times of rounds in us.
  std::vector<double> rounds(std::size_t count, std::byte* out, std::byte* in, std::size_t bytes) {
    std::vector<double> times;
    times.reserve(count);
    const auto start = Clock::now();
    const std::uint64_t first = ticks();
    std::uint64_t before = first;
    for (std::size_t i = 0; i < count; ++i) {
      if (arguments_.mode == Mode::latency)
        round_trip(out, in, bytes);
      else
        window(out, in, bytes);
      const std::uint64_t after = ticks();
      times.push_back(after - before);
      before = after;
    }
    const std::chrono::duration<double, std::micro> all = Clock::now() - start;
    for (double& time : times) time *= all.count() / (before - first);
    return times;
  }

  void round_trip(std::byte* out, std::byte* in, std::size_t bytes) {
    if (timing_) {
      communicator_.send(out, bytes, peer_, ping_tag);
      communicator_.recv(in, bytes, peer_, pong_tag);
    } else {
      communicator_.recv(in, bytes, peer_, ping_tag);
      communicator_.send(out, bytes, peer_, pong_tag);
    }
  }

  // Many messages in flight, then the receiver's word that it has them all.
  void window(std::byte* out, std::byte* in, std::size_t bytes) {
    const bool both = arguments_.mode == Mode::bidirectional;
    std::vector<std::shared_ptr<Request>> requests;
    requests.reserve(2 * arguments_.window);
    for (std::size_t i = 0; i < arguments_.window; ++i) {
      if (both || !timing_) requests.push_back(communicator_.irecv(in, bytes, peer_, ping_tag));
      if (both || timing_) requests.push_back(communicator_.isend(out, bytes, peer_, ping_tag));
    }
    for (const auto& request : requests) request->wait();
    char word = 0;
    if (timing_)
      communicator_.recv(&word, 1, peer_, pong_tag);
    else
      communicator_.send(&word, 1, peer_, pong_tag);
  }

  static double quantile(std::vector<double> times, double share) {
    const auto at = times.begin() + static_cast<std::ptrdiff_t>(share * (times.size() - 1));
    std::nth_element(times.begin(), at, times.end());
    return *at;
  }
  static double median(const std::vector<double>& times) { return quantile(times, 0.5); }

  void report(std::size_t bytes, const std::vector<double>& times) const {
    if (!timing_) return;
    std::printf("{\"mode\": \"%s\", \"transport\": \"%s\", \"rank\": %d, \"bytes\": %zu, ",
                name(arguments_.mode), arguments_.communicator.transport.c_str(),
                communicator_.rank(), bytes);
    std::printf("\"rounds\": %zu, ", times.size());
    if (arguments_.mode == Mode::latency) {
      double sum = 0;
      for (const double time : times) sum += time;
      std::printf("\"median_us\": %.4f, \"p99_us\": %.4f, \"mean_us\": %.4f, \"min_us\": %.4f}\n",
                  median(times) / 2, quantile(times, 0.99) / 2, sum / times.size() / 2,
                  quantile(times, 0) / 2);
    } else {
      const double messages =
          arguments_.window * (arguments_.mode == Mode::bidirectional ? 2.0 : 1.0);
      const double per_s = messages / median(times) * 1e6;
      std::printf("\"window\": %zu, \"messages_per_s\": %.1f, \"bytes_per_s\": %.1f, ",
                  arguments_.window, per_s, per_s * bytes);
      std::printf("\"p99_bytes_per_s\": %.1f}\n", messages * bytes / quantile(times, 0.99) * 1e6);
    }
    std::fflush(stdout);
  }

  Communicator& communicator_;
  const Arguments& arguments_;
  const int peer_;
  const bool timing_;
};

void run(const Arguments& arguments) {
  const auto communicator =
      Communicator::create(std::make_shared<FileStore>(arguments.store), arguments.communicator);
  End end(*communicator, arguments);
  for (const std::size_t bytes : arguments.sizes) end.measure(bytes);
}

}  // namespace

}  // namespace dicomm::bench

int main(int count, char** words) {
  using namespace dicomm;
  bench::Arguments arguments;
  try {
    arguments = bench::parse(count, words);
  } catch (const Error& error) {
    std::fprintf(stderr, "dicomm-perf: %s\n%s", error.what(), bench::usage().c_str());
    return 2;
  }
  try {
    bench::run(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dicomm-perf: %s\n", error.what());
    return 1;
  }
  return 0;
}
