// Long messages over shared memory: both ends copy them, or what happens where one of them cannot.
#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cstddef>

#include "core/fd.h"
#include "file_store.h"
#include "support.h"
#include "transport/shm/lane.h"
#include "transport/shm/shm.h"
#include "transport/shm/sizes.h"

using namespace dicomm;
using namespace dicomm::testing;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kLong = 8 * shm::kJointBytes + 5;

// From here on the calls fail in this process as where a container forbids them.
void forbid(std::initializer_list<unsigned> calls) {
  std::vector<sock_filter> filter{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
  };
  for (const unsigned call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw Error("no filter for system calls here");
}

// In a process of its own; its exit code, 0 unless the body throws. -1 where a signal ended it.
int exit_code_of(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      code = 1;
    }
    std::quick_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(what);
}

// Both ends in this process, and a view of what they share.
struct Pair {
  Fd segment = make_segment();
  Lane* lanes = nullptr;  // the sender sends in the first
  std::unique_ptr<Stream> sender, receiver;

  Pair() {
    lanes = static_cast<Lane*>(
        ::mmap(nullptr, 2 * sizeof(Lane), PROT_READ | PROT_WRITE, MAP_SHARED, segment.get(), 0));
    require(lanes != MAP_FAILED, "no shared memory");
    int both[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0, "no sockets");
    sender = shm_stream(Fd(both[0]), Fd(::dup(segment.get())), true);
    receiver = shm_stream(Fd(both[1]), Fd(::dup(segment.get())), false);
    for (Stream* from : {sender.get(), receiver.get()}) {
      const iovec word{const_cast<char*>("hello"), 5};
      from->write(&word, 1);
    }
    char words[5];
    for (Stream* to : {sender.get(), receiver.get()}) to->read(words, sizeof words);
  }
  ~Pair() { ::munmap(lanes, 2 * sizeof(Lane)); }

  Pull offer(const Bytes& from, Bytes& into) {
    sender->expose(1, from.data(), from.size());
    return {1, into.data(), reinterpret_cast<std::uint64_t>(from.data()), into.size(), {}};
  }
};

// Pulls until it ends; the last word about it.
Pulled finish(Pair& pair, Pull& pull, bool with_sender = true) {
  Pulled how = Pulled::waiting;
  for (int turns = 0; turns < 10'000 && !pull.done(); ++turns) {
    how = pair.receiver->pull(pull, with_sender);
    if (how == Pulled::withdrawn || how == Pulled::refused) break;
  }
  return how;
}

}  // namespace

TEST_CASE("what the receiver can read is not sent unasked, nor copied through the ring") {
  Pair pair;
  const Bytes from = payload(100'000, 3);
  Bytes into(from.size());
  Pull pull = pair.offer(from, into);
  REQUIRE(pair.receiver->can_pull(pull));
  CHECK(pair.sender->eager_bytes() == shm::kEagerBytes);
  pair.sender->become_crowded();
  CHECK(pair.sender->eager_bytes() == shm::kEagerByRingBytes);  // neither waits for a core
  CHECK(finish(pair, pull) == Pulled::moved);
  CHECK(into == from);
}

TEST_CASE("the sender copies slices of what is pulled, and none twice") {
  for (const bool sender_first : {true, false}) {
    Pair pair;
    const Bytes from = payload(kLong, 4);
    Bytes into(from.size());
    Pull pull = pair.offer(from, into);
    CHECK_FALSE(pair.sender->push());  // nobody pulls yet
    REQUIRE(pair.receiver->can_pull(pull));
    CHECK(pair.receiver->pull(pull, true) == Pulled::moved);
    CHECK_FALSE(pair.sender->prepare_sleep(false));
    pair.sender->woke();
    int pushed = 0;
    while (sender_first && pair.sender->push()) ++pushed;
    if (!sender_first) CHECK(pair.sender->push());
    CHECK(finish(pair, pull) == Pulled::moved);
    CHECK(into == from);
    CHECK_FALSE(pair.sender->push());
    if (sender_first) CHECK(pushed > 1);
  }
}

TEST_CASE("a receiver alone on its cores copies alone") {
  Pair pair;
  const Bytes from = payload(kLong, 5);
  Bytes into(from.size());
  Pull pull = pair.offer(from, into);
  REQUIRE(pair.receiver->can_pull(pull));
  CHECK(pair.receiver->pull(pull, false) == Pulled::moved);
  CHECK_FALSE(pair.sender->push());
  CHECK(finish(pair, pull, false) == Pulled::moved);
  CHECK(into == from);
}

TEST_CASE("memory that cannot be read is refused, at either end of it") {
  for (const std::size_t bytes : {20'000ul, kLong}) {
    Pair pair;
    Bytes into(bytes);
    const Bytes from = payload(bytes, 6);
    Pull pull = pair.offer(from, into);
    REQUIRE(pair.receiver->can_pull(pull));
    for (const std::uint64_t address : {std::uint64_t{8}, ~std::uint64_t{0} - bytes / 2}) {
      Pull astray = pull;
      astray.address = address;
      CHECK(finish(pair, astray) == Pulled::refused);
      CHECK_FALSE(pair.sender->push());
    }
    CHECK(finish(pair, pull) == Pulled::moved);
    CHECK(into == from);
  }
}

TEST_CASE("a slice that the sender cannot write, the receiver reads") {
  Pair pair;
  const Bytes from = payload(kLong, 7);
  Bytes into(from.size());
  Pull pull = pair.offer(from, into);
  REQUIRE(pair.receiver->can_pull(pull));
  CHECK(pair.receiver->pull(pull, true) == Pulled::moved);
  pair.lanes[0].joint.address = 8;
  CHECK(pair.sender->push());
  CHECK_FALSE(pair.sender->push());  // it does not try again
  CHECK(finish(pair, pull) == Pulled::moved);
  CHECK(into == from);
}

TEST_CASE("whatever the receiver says of a message, the sender reads no byte beyond it") {
  Pair pair;
  const Bytes from = payload(kLong, 8);
  Bytes into(from.size() + 100);
  Pull pull = pair.offer(from, into);
  REQUIRE(pair.receiver->can_pull(pull));
  REQUIRE(pair.receiver->pull(pull, true) == Pulled::moved);
  JointCopy& joint = pair.lanes[0].joint;
  const std::uint64_t turn = joint.taken >> 32;
  for (const std::uint64_t slice_bytes : {0ull, 1ull << 63, ~0ull}) {
    joint.slice_bytes = slice_bytes;
    joint.taken = turn << 32 | JointCopy::kFront;
    CHECK_FALSE(pair.sender->push());
  }
  joint.slice_bytes = kLong - 1;  // the second slice is one byte
  joint.address = reinterpret_cast<std::uint64_t>(into.data());
  CHECK(pair.sender->push());
  CHECK(into[kLong - 1] == from[kLong - 1]);
  CHECK(into[kLong] == std::byte{0});
  CHECK_FALSE(pair.sender->push());
}

TEST_CASE(
    "a receiver that gives up waits for the slice that the sender is copying, and no longer") {
  Pair pair;
  const Bytes from = payload(kLong, 9);
  Bytes into(from.size());
  Pull pull = pair.offer(from, into);
  REQUIRE(pair.receiver->can_pull(pull));
  REQUIRE(pair.receiver->pull(pull, true) == Pulled::moved);
  JointCopy& joint = pair.lanes[0].joint;
  const std::uint64_t turn = joint.taken >> 32;
  joint.taken += JointCopy::kBack;  // as the sender does when it takes one
  CHECK_FALSE(pair.receiver->abandon(pull));
  CHECK_FALSE(pair.sender->push());
  joint.through = turn << 32 | 1;
  CHECK(pair.receiver->abandon(pull));
  std::fill(into.begin(), into.end(), std::byte{0});
  CHECK_FALSE(pair.sender->push());
  CHECK(into == Bytes(from.size()));
}

TEST_CASE("nothing is taken for a message after its sender withdrew") {
  for (const std::size_t bytes : {20'000ul, kLong}) {
    Pair pair;
    const Bytes from = payload(bytes, 10);
    Bytes into(bytes);
    Pull pull = pair.offer(from, into);
    REQUIRE(pair.receiver->can_pull(pull));
    pair.sender->withdraw();
    CHECK(finish(pair, pull) == Pulled::withdrawn);
    CHECK_FALSE(pair.sender->push());
  }
}

TEST_CASE("where the kernel forbids it, the ring carries long messages") {
  CHECK(exit_code_of([] {
          forbid({SYS_process_vm_readv, SYS_process_vm_writev});
          Pair pair;
          const Bytes from = payload(kLong, 11);
          Bytes into(from.size());
          require(!pair.receiver->can_pull(pair.offer(from, into)), "it can be pulled");
          require(pair.sender->eager_bytes() == shm::kEagerByRingBytes, "it is not sent at once");
        }) == 0);
  CHECK(exit_code_of([] {  // reading alone is enough
          forbid({SYS_process_vm_writev});
          Pair pair;
          const Bytes from = payload(kLong, 12);
          Bytes into(from.size());
          Pull pull = pair.offer(from, into);
          require(pair.receiver->can_pull(pull), "it cannot be pulled");
          pair.receiver->pull(pull, true);
          require(!pair.sender->push(), "it was pushed");
          require(finish(pair, pull) == Pulled::moved && into == from, "it was not pulled");
        }) == 0);
  CHECK(exit_code_of([] {  // from some moment on
          Pair pair;
          const Bytes from = payload(kLong, 13);
          Bytes into(from.size());
          Pull pull = pair.offer(from, into);
          require(pair.receiver->can_pull(pull), "it cannot be pulled");
          pair.receiver->pull(pull, true);
          forbid({SYS_process_vm_readv, SYS_process_vm_writev});
          require(finish(pair, pull) == Pulled::refused, "it was not refused");
        }) == 0);
}

TEST_CASE(
    "long messages arrive, both ways at once, while the kernel begins to forbid the one copy") {
  run_ranks(2, "shm", [](const std::shared_ptr<Communicator>&) {});  // whatever is made once
  const int code = exit_code_of([] {
    run_ranks(2, "shm", [](const std::shared_ptr<Communicator>& ranks) {
      const int peer = 1 - ranks->rank();
      for (int round = 0; round < 40; ++round) {
        if (round == 20) forbid({SYS_process_vm_readv, SYS_process_vm_writev});  // this thread
        const std::size_t bytes = kLong + round * 1000;
        const Bytes sent = payload(bytes, round + ranks->rank());
        Bytes got(bytes);
        const auto send = ranks->isend(sent.data(), bytes, peer, round);
        require(ranks->irecv(got.data(), bytes, peer, round)->wait() == bytes, "another length");
        send->wait();
        require(!difference(got.data(), bytes, round + peer), "other contents");
      }
    });
  });
  CHECK(code == 0);
}

TEST_CASE("sizes around every threshold arrive, expected or not, many at once and both ways") {
  run_ranks(2, "shm", [](const std::shared_ptr<Communicator>& ranks) {
    const int peer = 1 - ranks->rank();
    std::vector<std::size_t> sizes;
    for (const std::size_t edge :
         {shm::kEagerBytes, shm::kEagerByRingBytes, shm::kJointBytes, shm::kWakeBytes,
          shm::kPieceBytes, 6 * shm::kSliceBytes, 3 * shm::kPieceBytes, 8 * shm::kPieceBytes})
      for (const std::size_t bytes : {edge - 1, edge, edge + 1}) sizes.push_back(bytes);
    for (const bool expected : {true, false}) {
      std::vector<Bytes> sent, got;
      std::vector<std::shared_ptr<Request>> sends, receives;
      const auto send = [&] {
        for (std::size_t i = 0; i < sizes.size(); ++i) {
          sent.push_back(payload(sizes[i], 100 * i + ranks->rank()));
          sends.push_back(ranks->isend(sent[i].data(), sizes[i], peer, i));
        }
      };
      for (const std::size_t bytes : sizes) got.emplace_back(bytes);
      const auto receive = [&] {
        for (std::size_t i = 0; i < sizes.size(); ++i)
          receives.push_back(ranks->irecv(got[i].data(), sizes[i], peer, i));
      };
      if (expected) receive();
      const auto met = ranks->isend(nullptr, 0, peer, 1000);
      ranks->irecv(nullptr, 0, peer, 1000)->wait();
      met->wait();
      send();
      if (!expected) receive();
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        CHECK(receives[i]->wait() == sizes[i]);
        CHECK_FALSE(difference(got[i].data(), sizes[i], 100 * i + peer));
      }
      for (const auto& request : sends) request->wait();
    }
  });
}
