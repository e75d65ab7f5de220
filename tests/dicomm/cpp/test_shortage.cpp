// A machine without threads or memory left: one sentence where they are needed, and no end of the
// process.
#include <doctest/doctest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/contact.h"
#include "core/frame.h"
#include "core/handshake.h"
#include "support.h"
#include "transport/registry.h"
#include "transport/tcp/security.h"
#include "transport/tcp/tcp.h"

using namespace dicomm;
using namespace dicomm::testing;
using namespace std::chrono_literals;

namespace {

// How many allocations of this size or more fail from now on, on whichever thread.
std::atomic<std::size_t> scarce_from{0};
std::atomic<int> to_fail{0};

bool fails(std::size_t bytes) {
  return to_fail > 0 && bytes >= scarce_from && to_fail.fetch_sub(1) > 0;
}

}  // namespace

// Out of line: else the compiler takes malloc() and free() below for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (!fails(bytes))
    if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

struct NoMemory {
  explicit NoMemory(std::size_t bytes) {
    scarce_from = bytes;
    to_fail = 1;
  }
  ~NoMemory() { to_fail = 0; }
  bool met() const { return to_fail == 0; }
};

// A thread's stack would be larger than the address space.
struct NoThreads {
  NoThreads() {
    pthread_getattr_default_np(&before);
    pthread_attr_t huge;
    pthread_getattr_default_np(&huge);
    REQUIRE(pthread_attr_setstacksize(&huge, std::size_t{1} << 46) == 0);
    REQUIRE(pthread_setattr_default_np(&huge) == 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before);
    pthread_attr_destroy(&before);
  }
  pthread_attr_t before;
};

// Rank 1 of 2, speaking for itself to rank 0.
Fd hand_made_rank_1(MemoryStore& store) {
  const auto contact = Contact::decode(store.get(contact_key("default", 0), 1s), 0);
  const std::atomic<bool> called_off{false};
  const Deadline deadline{std::chrono::steady_clock::now() + 10s, called_off};
  const std::string& address = contact.words[transport_index("tcp")];  // "127.0.0.1 4242"
  const auto space = address.find(' ');
  Fd socket = tcp_connect(address.substr(0, space), std::stoi(address.substr(space + 1)), deadline);
  const Identity me{1, 2, "default", "by hand", "here", "of the tests"};
  dial_handshake(socket, me, 0, deadline, SecurityCard::of(Security::by_place).write());
  return socket;
}

void exchange(const std::shared_ptr<Communicator>& from, const std::shared_ptr<Communicator>& to) {
  char byte = 0;
  const auto receive = to->irecv(&byte, 1, from->rank(), 3);
  from->isend("x", 1, to->rank(), 3)->wait(20s);
  CHECK(receive->wait(20s) == 1);
  CHECK(byte == 'x');
}

}  // namespace

TEST_CASE("without a thread to connect with a message is an error, and the next one is sent") {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = Communicator::create(store, options(0, 2, kAnyTransport));
  const auto b = Communicator::create(store, options(1, 2, kAnyTransport));
  {
    const NoThreads none;
    CHECK_THROWS_WITH_AS(a->isend("x", 1, 1, 3), doctest::Contains("no thread left"), Error);
    char byte;
    CHECK_THROWS_WITH_AS(a->irecv(&byte, 1, 1, 3), doctest::Contains("no thread left"), Error);
    CHECK_THROWS_WITH_AS(Communicator::create(store, options(0, 1, kAnyTransport)),
                         doctest::Contains("no thread left"), Error);
  }
  exchange(a, b);
  b->close();
  a->close();
}

TEST_CASE("without memory for a caller's connection the caller is refused, and the next is not") {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = Communicator::create(store, options(0, 2, "tcp"));
  {
    const NoMemory none(kReadAheadBytes);
    const Fd socket = hand_made_rank_1(*store);
    pollfd waiting{socket.get(), POLLIN, 0};
    CHECK(::poll(&waiting, 1, 20'000) == 1);
    char byte;
    CHECK(::recv(socket.get(), &byte, 1, 0) == 0);  // hung up on
    CHECK(none.met());
  }
  const auto b = Communicator::create(store, options(1, 2, "tcp"));
  exchange(b, a);
  exchange(a, b);
  b->close();
  a->close();
}

TEST_CASE("without memory for a message its sender is lost, with a reason") {
  const auto store = std::make_shared<MemoryStore>();
  const auto a = Communicator::create(store, options(0, 2, "tcp"));
  const Fd socket = hand_made_rank_1(*store);
  const NoMemory none(1 << 20);
  const FrameHeader header{.kind = FrameKind::eager, .tag = 1, .bytes = 1 << 20};
  REQUIRE(::send(socket.get(), &header, header.header_bytes(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(header.header_bytes()));
  char byte;
  CHECK_THROWS_WITH_AS(a->irecv(&byte, 1, 1, 2)->wait(20s), doctest::Contains("bad_alloc"),
                       PeerError);
  a->close();
}
