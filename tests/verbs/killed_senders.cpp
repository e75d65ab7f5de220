// killed_senders RANK SIZE FOLDER: ranks from 2 on send to rank 0 for ever, which kills one after
// another. Each has a group with rank 0, so that the death of one ends nothing of the others, while
// all come over rank 0's one device. In the end rank 1 tries whether rank 0 still has the buffers
// for a whole window. Rank 0 prints what it has pinned.
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "bench/file_store.h"
#include "core/communicator.h"
#include "core/text.h"

using namespace dicomm;

namespace {

constexpr std::size_t kBytes = 8000;  // a slot of several packets
constexpr int kWindow = 64;           // slots
using Message = std::vector<std::uint32_t>;

Message message(int sender, std::uint32_t number) {
  std::mt19937 random(static_cast<std::uint32_t>(sender) << 24 ^ number);
  Message words(kBytes / sizeof(std::uint32_t), random());
  words[0] = number;
  return words;
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw Error(what);
}

struct Rank {
  Rank(int rank, int size, const std::string& folder)
      : size(size), store(std::make_shared<bench::FileStore>(folder)) {
    options.rank = rank;
    options.world_size = size;
    options.secret = "a secret";
    options.transport = "verbs";
    options.nics = "rxe0";
    options.timeout = std::chrono::seconds(60);
    world = Communicator::create(store, options);
  }

  // Rank 0 is 0 there, the other one 1.
  std::shared_ptr<Communicator> pair_with_0(int peer) {
    Options pair = options;
    pair.rank = options.rank == 0 ? 0 : 1;
    pair.world_size = 2;
    pair.name = text("with ", peer);
    return world->subgroup(store, pair, {0, peer});
  }

  const int size;
  const std::shared_ptr<Store> store;
  Options options;
  std::shared_ptr<Communicator> world;
};

// How often a device was told that its peer has no receive buffer.
long refusals() {
  long count = 0;
  std::ifstream("/sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_rnr_err") >> count;
  return count;
}

std::string pinned() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmPin:")) return line;
  return "";
}

void receive(Communicator& pair, int sender, std::uint32_t number) {
  Message got(kBytes / sizeof(std::uint32_t));
  pair.recv(got.data(), kBytes, 1, 0);
  expect(got == message(sender, number), text("not message ", number, " of rank ", sender));
}

void survive(Rank& self) {
  std::map<int, std::shared_ptr<Communicator>> pairs;
  std::map<int, pid_t> pids;
  std::map<int, std::uint32_t> numbers;
  for (int peer = 1; peer < self.size; ++peer) {
    pairs[peer] = self.pair_with_0(peer);
    pairs[peer]->recv(&pids[peer], sizeof(pid_t), 1, 0);
  }
  for (auto& [peer, pair] : pairs) pair->send("!", 1, 1, 0);  // all are connected
  const auto receive_next = [&](int peer) { receive(*pairs[peer], peer, numbers[peer]++); };
  const auto ask = [&](char what) { pairs[1]->send(&what, 1, 1, 0); };
  std::mt19937 random(1);
  for (int victim = 2; victim < self.size; ++victim) {
    for (int round = 1 + random() % 5; round > 0; --round) {
      for (int peer = victim; peer < self.size; ++peer) receive_next(peer);
      ask('1');
      receive_next(1);
    }
    ::kill(pids[victim], SIGKILL);
    try {
      while (true) receive_next(victim);
    } catch (const PeerError&) {
    }
    pairs[victim]->close();
  }
  const pid_t own = ::getpid();
  ask('0');
  pairs[1]->send(&own, sizeof own, 1, 0);
  for (int i = 0; i < kWindow; ++i) receive_next(1);
  std::cout << pinned() << std::endl;
}

void answer(Communicator& pair) {
  std::uint32_t number = 0;
  for (char more; pair.recv(&more, 1, 0, 0), more == '1';)
    pair.send(message(1, number++).data(), kBytes, 0, 0);
  pid_t receiver;
  pair.recv(&receiver, sizeof receiver, 0, 0);
  const long before = refusals();
  ::kill(receiver, SIGSTOP);
  std::vector<Message> messages;
  std::vector<std::shared_ptr<Request>> sends;
  for (int i = 0; i < kWindow; ++i) messages.push_back(message(1, number++));
  for (const Message& each : messages) sends.push_back(pair.isend(each.data(), kBytes, 0, 0));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // a refusal takes far less
  const long refused = refusals() - before;
  ::kill(receiver, SIGCONT);
  for (const auto& send : sends) send->wait();
  expect(refused == 0, "rank 0 lacks receive buffers for a window");
}

void run(Rank& self) {
  const int rank = self.options.rank;
  if (rank == 0) return survive(self);
  const auto pair = self.pair_with_0(rank);
  const pid_t own = ::getpid();
  pair->send(&own, sizeof own, 0, 0);
  char go;
  pair->recv(&go, 1, 0, 0);
  if (rank == 1) return answer(*pair);
  for (std::uint32_t number = 0;; ++number) pair->send(message(rank, number).data(), kBytes, 0, 0);
}

}  // namespace

int main(int, char** words) {
  try {
    Rank self(std::stoi(words[1]), std::stoi(words[2]), words[3]);
    run(self);
  } catch (const std::exception& error) {
    std::cerr << "rank " << words[1] << ": " << error.what() << std::endl;
    return 1;
  }
}
