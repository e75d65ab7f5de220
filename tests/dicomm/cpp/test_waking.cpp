// What a message costs a rank that has many connections besides: as much as with few.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "support.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

std::array<std::atomic<std::uint64_t>, 4096> looks;  // at each descriptor, in this process

void forget_looks() {
  for (auto& one : looks) one = 0;
}

// But for both ends of the connection that is looked at most.
std::uint64_t looks_at_idle() {
  std::vector<std::uint64_t> found(looks.begin(), looks.end());
  std::ranges::sort(found, std::greater());
  return std::accumulate(found.begin() + 2, found.end(), std::uint64_t{0});
}

constexpr int kMessages = 300;
constexpr int kRounds = 30;  // of so many messages, in which connections come to rest
constexpr std::chrono::microseconds kPause{300};  // for who receives to fall asleep

void exchange(Communicator& communicator, int peer, bool begins) {
  char word = 'w';
  for (int i = 0; i < kMessages; ++i) {
    if (begins) std::this_thread::sleep_for(kPause);
    if (begins) communicator.send(&word, 1, peer, 1);
    communicator.recv(&word, 1, peer, 1);
    if (!begins) communicator.send(&word, 1, peer, 1);
  }
}

// At idle connections, in the first round of messages between rank 1 and rank 0, to which all are
// connected, that has few of them; else in the last.
std::uint64_t looks_with(int world_size) {
  std::uint64_t found = 0;
  run_ranks(world_size, "tcp", [&](const std::shared_ptr<Communicator>& communicator) {
    char word = 'w';
    const int rank = communicator->rank();
    if (rank == 0) {
      for (int peer = 1; peer < world_size; ++peer) communicator->recv(&word, 1, peer, 0);
      for (int round = 0; round < kRounds && word != 'e'; ++round) {
        forget_looks();
        exchange(*communicator, 1, false);
        found = looks_at_idle();
        word = found < kMessages || round + 1 == kRounds ? 'e' : 'w';
        communicator->send(&word, 1, 1, 3);
      }
      for (int peer = 1; peer < world_size; ++peer) communicator->send(&word, 1, peer, 2);
    } else {
      communicator->send(&word, 1, 0, 0);
      while (rank == 1 && word != 'e') {
        exchange(*communicator, 0, true);
        communicator->recv(&word, 1, 0, 3);
      }
      communicator->recv(&word, 1, 0, 2);
    }
  });
  return found;
}

}  // namespace

// In place of the C library's.
extern "C" ssize_t recv(int socket, void* data, std::size_t bytes, int flags) {
  static const auto received = reinterpret_cast<decltype(&recv)>(::dlsym(RTLD_NEXT, "recv"));
  if (socket >= 0 && static_cast<std::size_t>(socket) < looks.size()) ++looks[socket];
  return received(socket, data, bytes, flags);
}

TEST_CASE("a wake-up looks at the connections that have something to do") {
  const std::uint64_t found = looks_with(40);
  INFO(found, " looks at idle connections for ", kMessages, " messages each way");
  CHECK(found < kMessages);
}
