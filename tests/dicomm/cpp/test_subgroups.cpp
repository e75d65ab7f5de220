// Communicators of some ranks of another one, which share its connections.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "processes.h"
#include "transports.h"

using namespace dicomm;
using namespace dicomm::testing;
using namespace std::chrono_literals;

namespace {

using Ranks = std::shared_ptr<Communicator>;

struct Job {
  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  std::string transport;

  Options options_of(int rank, int size, const std::string& name) const {
    Options asked = options(rank, size, transport);
    asked.name = name;
    return asked;
  }
  // The group of those of the world's ranks, made by one of them.
  Ranks group(const Ranks& world, const std::string& name, const std::vector<int>& ranks) const {
    const auto own = std::find(ranks.begin(), ranks.end(), world->rank());
    const auto rank = static_cast<int>(own - ranks.begin());
    return world->subgroup(store, options_of(rank, static_cast<int>(ranks.size()), name), ranks);
  }
};

// body(world, job) on one thread a rank.
void run_world(int size, const std::string& transport,
               const std::function<void(const Ranks&, const Job&)>& body) {
  Job job;
  job.transport = transport;
  run_threads(size, [&](int rank) {
    const auto world = Communicator::create(job.store, job.options_of(rank, size, "world"));
    body(world, job);
  });
}

void tell(Communicator& ranks, int peer, std::uint64_t tag, const Bytes& data = {}) {
  ranks.send(data.data(), data.size(), peer, tag);
}

bool hears(Communicator& ranks, int peer, std::uint64_t tag, std::size_t bytes = 0,
           std::uint64_t key = 0) {
  Bytes got(bytes);
  return ranks.recv(got.data(), got.size(), peer, tag) == bytes &&
         !difference(got.data(), bytes, key);
}

// Every rank has said something to every other one.
void meet(Communicator& ranks, std::uint64_t tag) {
  std::vector<std::shared_ptr<Request>> all;
  for (int peer = 0; peer < ranks.world_size(); ++peer) {
    if (peer == ranks.rank()) continue;
    all.push_back(ranks.isend(nullptr, 0, peer, tag));
    all.push_back(ranks.irecv(nullptr, 0, peer, tag));
  }
  for (const auto& request : all) request->wait();
}

template <class E>
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "no such error";
}

bool is_stopped(pid_t process) {
  std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
  std::string id, name, state;
  return stat >> id >> name >> state && state == "T";
}

std::ptrdiff_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

}  // namespace

TRANSPORT_TEST_CASE("messages of one tag keep to their group, whose ranks have its own numbers") {
  run_world(3, transport, [](const Ranks& world, const Job& job) {
    const Ranks turned = job.group(world, "turned", {2, 0, 1});
    std::vector<Ranks> all{world, turned};
    if (world->rank() != 1) all.push_back(job.group(world, "pair", {2, 0}));
    for (std::size_t i = 0; i < all.size(); ++i) {
      Communicator& ranks = *all[i];
      CHECK(ranks.world_size() == (i == 2 ? 2 : 3));
      std::vector<std::shared_ptr<Request>> sends;
      std::vector<Bytes> data;
      for (int peer = 0; peer < ranks.world_size(); ++peer)
        data.push_back(payload(peer % 2 ? 100 : 300'000, mix(i, ranks.rank(), peer)));
      for (int peer = 0; peer < ranks.world_size(); ++peer)
        if (peer != ranks.rank())
          sends.push_back(ranks.isend(data[peer].data(), data[peer].size(), peer, 7));
      for (std::size_t k = 0; k < sends.size(); ++k) {
        Bytes got(300'000);
        const auto receive = ranks.irecv(got.data(), got.size(), Communicator::any_source, 7);
        const std::size_t bytes = receive->wait();
        CHECK(bytes == (ranks.rank() % 2 ? 100 : 300'000));
        CHECK_FALSE(difference(got.data(), bytes, mix(i, receive->peer(), ranks.rank())));
      }
      for (const auto& send : sends) send->wait();
    }
    for (const Ranks& ranks : all) meet(*ranks, 8);
  });
}

TRANSPORT_TEST_CASE("a message may come before its receiver has made the group") {
  run_world(2, transport, [](const Ranks& world, const Job& job) {
    const Bytes small = payload(1000, 1), large = payload(2 << 20, 2);
    if (world->rank() == 0) {
      const Ranks late = job.group(world, "late", {0, 1});
      const auto first = late->isend(small.data(), small.size(), 1, 3);
      const auto second = late->isend(large.data(), large.size(), 1, 3);
      first->wait();
      tell(*world, 1, 1);
      second->wait();
      CHECK(hears(*late, 1, 4));
      return;
    }
    CHECK(hears(*world, 0, 1));
    const Ranks late = job.group(world, "late", {0, 1});
    CHECK(hears(*late, 0, 3, small.size(), 1));
    CHECK(hears(*late, 0, 3, large.size(), 2));
    tell(*late, 0, 4);
  });
}

TRANSPORT_TEST_CASE("groups add no thread and no descriptor to those of the world") {
  constexpr int kRanks = 6, kGroups = 50;
  std::atomic<std::ptrdiff_t> threads{0}, descriptors{0};
  run_world(kRanks, transport, [&](const Ranks& world, const Job& job) {
    const auto together = [&](std::uint64_t tag) {
      meet(*world, tag);
      meet(*world, tag + 1);
    };
    together(1);
    std::this_thread::sleep_for(50ms);  // threads that connected end
    together(3);
    if (world->rank() == 0)
      threads = entries("/proc/self/task"), descriptors = entries("/proc/self/fd");
    together(5);
    std::vector<Ranks> groups;
    for (int i = 0; i < kGroups; ++i)
      groups.push_back(job.group(world, "group " + std::to_string(i), {0, 1, 2, 3, 4, 5}));
    for (const Ranks& group : groups) meet(*group, 9);
    together(7);
    if (world->rank() == 0) {
      CHECK(entries("/proc/self/task") <= threads);
      CHECK(entries("/proc/self/fd") <= descriptors);
    }
    together(9);
  });
}

TRANSPORT_TEST_CASE("a group is closed while others work on, also that of all ranks") {
  run_world(2, transport, [](const Ranks& world, const Job& job) {
    const int peer = 1 - world->rank();
    Ranks first = job.group(world, "first", {0, 1});
    const Ranks second = job.group(world, "second", {1, 0});
    meet(*first, 1);
    meet(*second, 1);
    meet(*world, 1);
    std::byte got[8];
    const auto of_first = first->irecv(got, sizeof got, peer, 2);
    if (world->rank() == 0) {
      tell(*first, 1, 5, payload(4, 5));
      first->close();
      CHECK(contains(error_of<AbortedError>([&] { of_first->wait(); }), "closed"));
      CHECK(contains(error_of<AbortedError>([&] { tell(*first, 1, 3); }), "closed"));
    } else {
      CHECK(contains(error_of<PeerError>([&] { of_first->wait(); }), "left"));
      CHECK(hears(*first, 0, 5, 4, 5));  // its last words count
      CHECK(contains(error_of<PeerError>([&] { tell(*first, 0, 3); }), "left"));
    }
    for (int i = 0; i < 100; ++i) meet(i % 2 ? *second : *world, 2);
    world->close();
    for (int i = 0; i < 100; ++i) meet(*second, 3);
    CHECK(world->failure() == "");
    CHECK(second->failure() == "");
  });
}

TRANSPORT_TEST_CASE("who comes to a group late learns who has left it, or why it failed") {
  run_world(2, transport, [](const Ranks& world, const Job& job) {
    meet(*world, 1);
    if (world->rank() == 0) {
      job.group(world, "left", {0, 1})->close();
      const Ranks failed = job.group(world, "failed", {0, 1});
      failed->abort("of no use");
      meet(*world, 2);
      meet(*world, 3);
      return;
    }
    meet(*world, 2);
    const Ranks left = job.group(world, "left", {0, 1}),
                failed = job.group(world, "failed", {0, 1});
    std::byte got[8];
    CHECK(contains(error_of<PeerError>([&] { left->recv(got, sizeof got, 0, 1); }), "left"));
    CHECK(contains(error_of<PeerError>([&] { failed->recv(got, sizeof got, 0, 1); }), "of no use"));
    meet(*world, 3);
  });
}

TRANSPORT_TEST_CASE("a group that fails with messages under way leaves the others alone") {
  run_world(3, transport, [](const Ranks& world, const Job& job) {
    const Ranks failing = job.group(world, "failing", {0, 1, 2});
    const Ranks working = job.group(world, "working", {0, 1, 2});
    meet(*failing, 1);
    meet(*working, 1);
    const int next = (world->rank() + 1) % 3, before = (world->rank() + 2) % 3;
    for (int round = 0; round < 3; ++round) {
      const Bytes data = payload(3 << 20, mix(round, world->rank()));
      Bytes got(data.size());
      const auto send = working->isend(data.data(), data.size(), next, 2);
      std::vector<std::shared_ptr<Request>> doomed;
      std::vector<Bytes> buffers(8, Bytes(1 << 20));
      for (std::size_t i = 0; round == 1 && i < buffers.size(); ++i)
        doomed.push_back(i % 2 ? failing->isend(buffers[i].data(), buffers[i].size(), next, i)
                               : failing->irecv(buffers[i].data(), buffers[i].size(), before,
                                                i % 4 ? i + 1 : i + 100));
      if (round == 1 && world->rank() == 0) failing->abort("on purpose");
      for (const auto& request : doomed) try {
          request->wait();
        } catch (const Error& error) {
          CHECK(contains(error.what(), "on purpose"));
        }
      doomed.clear();
      for (Bytes& buffer : buffers) fill(buffer.data(), buffer.size(), 99);
      CHECK(working->recv(got.data(), got.size(), before, 2) == data.size());
      CHECK_FALSE(difference(got.data(), got.size(), mix(round, before)));
      send->wait();
    }
    CHECK(contains(failing->failure(), "on purpose"));
    CHECK(working->failure() == "");
    meet(*working, 3);
    meet(*world, 3);
  });
}

TRANSPORT_TEST_CASE("two groups are used from two threads") {
  run_world(2, transport, [](const Ranks& world, const Job& job) {
    const Ranks groups[] = {job.group(world, "one", {0, 1}), job.group(world, "two", {1, 0})};
    run_threads(2, [&](int thread) {
      Communicator& ranks = *groups[thread];
      const int peer = 1 - ranks.rank();
      for (std::size_t i = 0; i < 500; ++i) {
        const std::size_t bytes = i % 50 == 0 ? 400'000 : 64;
        const Bytes data = payload(bytes, mix(thread, i, ranks.rank()));
        const auto send = ranks.isend(data.data(), bytes, peer, 1);
        CHECK(hears(ranks, peer, 1, bytes, mix(thread, i, peer)));
        send->wait();
      }
    });
  });
}

TEST_CASE("a group over another transport has connections of its own, if all agree") {
  run_world(2, "shm", [](const Ranks& world, const Job& job) {
    Job other = job;
    other.transport = "tcp";
    const Ranks ranks = other.group(world, "other", {0, 1});
    meet(*world, 1);
    meet(*ranks, 1);
    CHECK(world->describe_link(1 - world->rank()).transport == "shm");
    CHECK(ranks->describe_link(1 - world->rank()).transport == "tcp");
    const Ranks shared = world->rank() == 0 ? job.group(world, "unlike", {0, 1}) : nullptr;
    if (world->rank() == 1)
      CHECK(contains(error_of<Error>([&] { other.group(world, "unlike", {0, 1}); }),
                     "expected the same on every rank"));
    meet(*world, 2);
  });
}

TEST_CASE("a group that names its ranks wrongly is refused in one sentence") {
  run_world(1, "shm", [](const Ranks& world, const Job& job) {
    const auto refused = [&](int rank, int size, const std::vector<int>& ranks) {
      return error_of<Error>(
          [&] { world->subgroup(job.store, job.options_of(rank, size, "wrong"), ranks); });
    };
    CHECK(contains(refused(0, 2, {0, 1}), "rank 1 is not one of the 1 ranks"));
    CHECK(contains(refused(0, 2, {0, 0}), "named twice"));
    CHECK(contains(refused(1, 2, {0}), "in the 1 ranks that were named"));
    CHECK_NOTHROW(world->subgroup(job.store, job.options_of(0, 1, "alone"), {0}));
  });
}

TRANSPORT_TEST_CASE("a rank that is stopped holds up neither an abort nor a close, and lives on") {
  const TemporaryFolder folder;
  const Processes ranks(2, transport, [&](const Ranks& world) {
    const Job job{std::make_shared<FileStore>(folder.path()), transport};
    const Ranks aborted = job.group(world, "aborted", {0, 1});
    const Ranks closed = job.group(world, "closed", {0, 1});
    for (const Ranks& each : {world, aborted, closed}) meet(*each, 1);
    if (world->rank() == 0) {
      pid_t other = 0;
      world->recv(&other, sizeof other, 1, 2);
      const std::shared_ptr<void> wakes(nullptr, [&](void*) { ::kill(other, SIGCONT); });
      while (!is_stopped(other)) std::this_thread::sleep_for(1ms);
      Bytes data = payload(2 << 20, 1);
      const auto first = aborted->isend(data.data(), data.size(), 1, 3);
      const auto second = closed->isend(data.data(), data.size(), 1, 3);
      auto third = world->isend(data.data(), data.size(), 1, 3);
      aborted->abort("give up");
      require(first->finished(), "the abort left a send unfinished");
      require(contains(error_of<AbortedError>([&] { first->wait(); }), "give up"), "no reason");
      closed->close();
      require(second->finished(), "the close left a send unfinished");
      third.reset();
      fill(data.data(), data.size(), 99);
    } else {
      std::vector<Bytes> got(3, Bytes(2 << 20));
      const auto receive = [&](const Ranks& from, int i) {
        return from->irecv(got[i].data(), got[i].size(), 0, 3);
      };
      const auto first = receive(aborted, 0), second = receive(closed, 1),
                 third = receive(world, 2);
      const pid_t me = ::getpid();
      world->send(&me, sizeof me, 0, 2);
      ::raise(SIGSTOP);
      require(contains(error_of<PeerError>([&] { first->wait(); }), "give up"), "not aborted");
      require(contains(error_of<PeerError>([&] { second->wait(); }), "left"), "not closed");
      require(contains(error_of<Error>([&] { third->wait(); }), "took the message back"),
              "not taken back");
    }
    meet(*world, 4);
    require(world->failure() == "", world->failure());
  });
  for (const int rank : {0, 1}) CHECK(ranks.exit_code(rank) == 0);
}

TRANSPORT_TEST_CASE("who left a group in order and dies later does not end it") {
  const TemporaryFolder folder;
  const Processes ranks(3, transport, [&](const Ranks& world) {
    const Job job{std::make_shared<FileStore>(folder.path()), transport};
    const Ranks group = job.group(world, "group", {0, 1, 2});
    meet(*world, 1);
    meet(*group, 1);
    std::byte byte;
    if (world->rank() == 2) {
      group->close();
      for (const int peer : {0, 1}) require(hears(*world, peer, 2), "another message");
      ::kill(::getpid(), SIGKILL);
    }
    require(contains(error_of<PeerError>([&] { group->recv(&byte, 1, 2, 3); }), "left"),
            "is there");
    tell(*world, 2, 2);
    require(contains(error_of<PeerError>([&] { world->recv(&byte, 1, 2, 3); }), "died"), "lives");
    if (group->rank() == 0) {
      tell(*group, 1, 4);
      require(hears(*group, 1, 4), "another message");
    } else {
      require(hears(*group, 0, 4), "another message");
      tell(*group, 0, 4);
    }
    require(group->failure() == "", group->failure());
  });
  for (const int rank : {0, 1, 2}) CHECK(ranks.exit_code(rank) == (rank == 2 ? -1 : 0));
}

TRANSPORT_TEST_CASE("a group that is made after a rank's death fails for all, whoever noticed") {
  const TemporaryFolder folder;
  const Processes ranks(3, transport, [&](const Ranks& world) {
    const Job job{std::make_shared<FileStore>(folder.path()), transport};
    std::byte byte;
    if (world->rank() == 2) {
      require(hears(*world, 1, 1), "another message");
      ::kill(::getpid(), SIGKILL);
    }
    const int other = 1 - world->rank();
    if (other == 0) tell(*world, 2, 1);  // rank 0 is not connected with it
    const int awaited = other == 0 ? 2 : 1;
    require(contains(error_of<PeerError>([&] { world->recv(&byte, 1, awaited, 2); }), "died"),
            "lives");
    const Ranks group = job.group(world, "group", {0, 1, 2});
    require(contains(error_of<PeerError>([&] { group->recv(&byte, 1, other, 3); }), "died"),
            "lives");
    job.store->set("heard/" + std::to_string(world->rank()), "");
    job.store->get("heard/" + std::to_string(other), 60s);
  });
  for (const int rank : {0, 1, 2}) CHECK(ranks.exit_code(rank) == (rank == 2 ? -1 : 0));
}

TRANSPORT_TEST_CASE("what a group leaves open about a rank is as in the world") {
  for (const int with_chip : {0, 1}) {
    Job job;
    job.transport = transport;
    run_threads(2, [&](int rank) {
      Options asked = job.options_of(rank, 2, "world");
      if (rank == with_chip) asked.chip = "0000:41:00.0";
      const Ranks world = Communicator::create(job.store, asked);
      meet(*world, 1);
      const std::string link = world->describe_link(1 - rank).transport;
      const Ranks group = job.group(world, "group", {0, 1});
      CHECK(group->describe_link(1 - rank).transport == link);  // it is connected already
      meet(*group, 1);
    });
  }
}

TRANSPORT_TEST_CASE("a group whose world is closed has connections of its own") {
  run_world(2, transport, [](const Ranks& world, const Job& job) {
    meet(*world, 1);
    world->close();
    meet(*job.group(world, "group", {0, 1}), 1);
  });
}

TEST_CASE("groups that are made and closed for ever do not run out") {
  run_world(1, "shm", [](const Ranks& world, const Job& job) {
    for (int i = 0; i < 66'000; ++i) job.group(world, "group", {0});
  });
}
