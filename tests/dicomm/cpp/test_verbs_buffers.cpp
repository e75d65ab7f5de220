// The memory that slots are sent from and arrive in: how much a device is given, and that none of
// it is lost. Real devices: tests/verbs.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <memory>
#include <vector>

#include "fake_verbs.h"
#include "wire.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

constexpr std::size_t kSlotPayload = verbs::kSlotBytes - sizeof(verbs::SlotHeader);

// One rank and its peers, each with a device of its own.
struct Hub {
  explicit Hub(bool has_shared_queues) { nic.has_shared_queues(has_shared_queues); }

  // The left side is the peer's.
  Wire connect() {
    if (!rails) rails = fake_rails({&nic}, 1);
    const int number = static_cast<int>(peers.size());
    peers.push_back(std::make_unique<FakeNic>("peer"));
    return Wire(fake_rails({peers.back().get()}, 2 + number), rails);
  }

  FakeNic nic{"hub"};
  std::vector<std::unique_ptr<FakeNic>> peers;
  std::shared_ptr<verbs::Rails> rails;
};

// Slots that fill themselves and wait at the right side's device.
void send_slots(Wire& wire, const Bytes& from, std::size_t count) {
  std::size_t written = 0;
  while (written < count * kSlotPayload) {
    const iovec part{const_cast<std::byte*>(from.data()) + written, count * kSlotPayload - written};
    const std::size_t more = wire.left->write(&part, 1);
    REQUIRE(more > 0);
    written += more;
  }
}

Bytes read_all(Stream& stream, std::size_t bytes) {
  Bytes into(bytes);
  std::size_t got = 0;
  while (got < bytes) {
    const std::size_t more = stream.read(into.data() + got, bytes - got);
    REQUIRE(more > 0);
    got += more;
  }
  return into;
}

}  // namespace

TEST_CASE("what a further peer costs: a few buffers of a shared queue, or a window of its own") {
  for (const bool shared : {true, false}) {
    Hub hub(shared);
    std::vector<Wire> wires;
    std::size_t first = 0;
    for (int i = 0; i < 31; ++i) {
      wires.push_back(hub.connect());
      const Bytes word = payload(8, i);
      CHECK(copied(*wires.back().left, *wires.back().right, word) == word);
      CHECK(copied(*wires.back().right, *wires.back().left, word) == word);
      if (i == 0) first = hub.nic.registered_bytes;
    }
    const std::size_t each = (hub.nic.registered_bytes - first) / 30;
    CHECK((each < 30'000) == shared);
    CHECK(each < 800'000);
  }
}

TEST_CASE("a shared queue grows where less than half is left, and all that came arrives") {
  Hub hub(true);
  std::vector<Wire> wires;
  for (int i = 0; i < 4; ++i) wires.push_back(hub.connect());
  std::byte byte;
  for (Wire& wire : wires) CHECK(wire.right->read(&byte, 1) == 0);  // the dialler's first word
  const std::size_t before = hub.nic.registered_bytes;
  const Bytes from = payload(5 * kSlotPayload, 1);
  for (int round = 0; round < 4; ++round)
    for (Wire& wire : wires) send_slots(wire, from, 5);
  CHECK(hub.nic.shared_receives < 8);
  for (Wire& wire : wires)
    for (int round = 0; round < 4; ++round) CHECK(read_all(*wire.right, from.size()) == from);
  CHECK(hub.nic.registered_bytes > before);
  CHECK(hub.nic.registered_bytes < before + 100 * verbs::kSlotBytes);
  CHECK(hub.nic.shared_receives > 120);
}

TEST_CASE("however a connection ends, the buffers of a shared queue are posted again") {
  Hub hub(true);
  Wire lasting = hub.connect();
  const std::size_t before = hub.nic.shared_receives;
  const Bytes from = payload(30 * kSlotPayload, 2);
  for (int round = 0; round < 100; ++round) {
    Wire wire = hub.connect();
    send_slots(wire, from, 30);
    std::byte byte;
    // The fourth way waits a second for the peer's last words.
    switch (round < 12 ? round % 4 : round % 3) {
      case 0:  // nothing was looked at
        break;
      case 1:  // all has arrived, most was not read
        CHECK(wire.right->read(&byte, 1) == 1);
        break;
      case 2: {  // its rails were closed, and it lives on
        const Bytes exposed = payload(1000, 3);
        wire.right->expose(1, exposed.data(), exposed.size());
        wire.right->withdraw();
        wire.right->conceal(1);
        CHECK(hub.nic.shared_receives + 8 > before);
        break;
      }
      case 3:  // its device gave it up
        read_all(*wire.right, from.size());
        wire.left->read(&byte, 1);
        hub.nic.takes = [](Post post) { return post != Post::send; };
        words_on_stderr([&] {
          CHECK_THROWS_AS(([&] {
                            const iovec part{&byte, 1};
                            for (;;) wire.right->write(&part, 1);
                          }()),
                          StreamEnd);
        });
        hub.nic.takes = [](Post) { return true; };
        break;
    }
  }
  CHECK(hub.nic.shared_receives + 8 > before);
  CHECK(copied(*lasting.left, *lasting.right, from) == from);
}

TEST_CASE("a malformed slot ends the stream, and those after it give their buffers back") {
  Hub hub(true);
  Wire lasting = hub.connect();
  const std::size_t before = hub.nic.shared_receives;
  for (int round = 0; round < 50; ++round) {
    const auto rails = fake_rails({hub.peers[0].get()}, 2);
    verbs::Endpoint theirs(rails, hub.rails->published());
    verbs::Endpoint ours(hub.rails, rails->published());
    const verbs::Card card = ours.card();
    ours.connect(theirs.card());
    int both[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
    const Fd peer(both[0]);
    const auto stream = ours.stream(Fd(both[1]), false);
    for (int i = 0; i < 20; ++i) REQUIRE(deliver(card.rail[0].qp_number, "words", 5));
    std::byte into[5];
    CHECK_THROWS_AS(stream->read(into, sizeof into), StreamEnd);
  }
  CHECK(hub.nic.shared_receives + 8 > before);
}

TEST_CASE("a device without shared queues, or that takes no bytes along, moves the same") {
  for (const bool shared : {true, false})
    for (const std::uint32_t inline_bytes : {0u, 256u}) {
      FakeNic left("left"), right("right");
      left.has_shared_queues(shared);
      left.inline_bytes = right.inline_bytes = inline_bytes;
      Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
      const Bytes from = payload(3 << 20, 5);
      CHECK(copied(*wire.left, *wire.right, from) == from);
      CHECK(copied(*wire.right, *wire.left, from) == from);
    }
}

TEST_CASE("memory for slots that cannot be registered ends the connection with a sentence") {
  FakeNic left("left"), right("right");
  Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
  left.registers = [](std::uint64_t) { return false; };
  std::string reason;
  try {
    const Bytes from = payload(1000, 6);
    copied(*wire.left, *wire.right, from);
  } catch (const StreamEnd& end) {
    reason = end.reason;
  }
  CHECK(contains(reason, "left cannot register"));
  CHECK(contains(reason, "ulimit -l"));
}

TEST_CASE("without a descriptor to sleep on there is no connection, and a sentence") {
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
  verbs::Endpoint dialler(left_rails, right_rails->published());
  verbs::Endpoint acceptor(right_rails, left_rails->published());
  acceptor.connect(dialler.card());
  int both[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
  const Fd theirs(both[1]);
  Fd ours(both[0]);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const int next = ::dup(both[0]);
  ::close(next);
  const rlimit none_left{static_cast<rlim_t>(next), before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none_left);
  CHECK_THROWS_WITH_AS(acceptor.stream(std::move(ours), false),
                       doctest::Contains("no file descriptors left"), Error);
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST_CASE("peers that die within a slot, one after another, leave buffers for the next") {
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
  for (int peer = 0; peer < 200; ++peer) {
    const verbs::Endpoint ours(right_rails, left_rails->published());
    constexpr std::uint32_t kTooMany = 1 << 20;  // bytes: the buffer is taken, and nobody is told
    CHECK_FALSE(deliver(ours.card().rail[0].qp_number, nullptr, kTooMany));
  }
  Wire wire(left_rails, right_rails);
  const Bytes from = payload(1 << 20, 41);
  CHECK((copied(*wire.left, *wire.right, from) == from));
}
