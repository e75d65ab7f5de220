// What can be told about verbs without a NIC: how queue pairs are connected, which address is
// chosen, which memory is registered, how long messages are read. Real devices: tests/verbs.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>
#include <span>

#include "fake_verbs.h"
#include "support.h"
#include "transport/verbs/endpoint.h"
#include "wire.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

verbs::Settings settings_from(const char* variable, const char* value) {
  ::setenv(variable, value, 1);
  struct Unset {
    const char* variable;
    ~Unset() { ::unsetenv(variable); }
  } unset{variable};
  return verbs::settings(Options{});
}

std::string refusal_of(const char* variable, const char* value) {
  try {
    settings_from(variable, value);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a queue pair's packets survive routers, and its timer fits its field") {
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
  const Wire wire(left_rails, right_rails);
  const auto told = [&](ibv::QpState state) {
    for (const auto& attributes : left.connected)
      if (attributes.state == state) return attributes;
    FAIL("never went there");
    return ibv::QpAttributes{};
  };
  const auto route = told(ibv::QpState::rtr).address.route;
  CHECK(route.hop_limit > 1);
  CHECK(route.destination == ipv4_gid(0, 10, 0, 0, 2).gid);
  CHECK(route.gid_index == 3);
  const auto sending = told(ibv::QpState::rts);
  CHECK(sending.timeout > 0);  // 0: never notices a loss
  CHECK(sending.timeout < 32);
  CHECK(sending.retry_count < 8);
  CHECK(sending.rnr_retry == 7);  // for ever: receivers may be short of buffers
}

TEST_CASE("settings that a field cannot hold are refused, those it can are used") {
  CHECK(contains(refusal_of("DICOMM_QP_TIMEOUT", "32"), "expected 0 to 31"));
  CHECK(contains(refusal_of("DICOMM_RETRY_COUNT", "8"), "expected 0 to 7"));
  CHECK(contains(refusal_of("DICOMM_HOP_LIMIT", "0"), "expected 1 to 255"));
  CHECK(contains(refusal_of("DICOMM_HOP_LIMIT", "many"), "whole number"));
  CHECK(contains(refusal_of("DICOMM_MTU_BYTES", "1500"), "DICOMM_MTU_BYTES 1500: expected 256"));
  CHECK(contains(refusal_of("DICOMM_CONNECT", "magic"), "DICOMM_CONNECT 'magic': expected auto"));
  const auto refusal_of_option = [](auto change) {
    Options given;
    change(given.verbs);
    try {
      verbs::settings(given);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(contains(refusal_of_option([](auto& o) { o.timeout = 99; }), "qp_timeout 99: expected 0"));
  CHECK(contains(refusal_of_option([](auto& o) { o.mtu_bytes = 300; }), "mtu_bytes 300: expected"));
  CHECK(contains(refusal_of_option([](auto& o) { o.connect = "magic"; }), "connect 'magic': "));
  CHECK(settings_from("DICOMM_QP_TIMEOUT", "31").timeout == 31);
  FakeNic left("left"), right("right");
  verbs::Settings asked;
  asked.hop_limit = 7;
  asked.traffic_class = 106;
  asked.timeout = 31;
  asked.mtu_bytes = 1024;
  const Wire wire(fake_rails({&left}, 1, asked), fake_rails({&right}, 2));
  CHECK(left.connected[1].address.route.hop_limit == 7);
  CHECK(left.connected[1].address.route.traffic_class == 106);
  CHECK(left.connected[2].timeout == 31);
  CHECK(left.connected[1].path_mtu == 3);
  CHECK(right.connected[1].path_mtu == 3);  // both sides alike
}

TEST_CASE("on a port with many GIDs the one that reaches the peer is chosen") {
  const auto v1 = [](verbs::GidEntry entry) {
    entry.roce_v2 = false;
    return entry;
  };
  verbs::GidEntry link_local;
  link_local.gid = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1};
  link_local.roce_v2 = true;
  link_local.index = 1;
  const std::vector<verbs::GidEntry> mine{v1(link_local),
                                          link_local,
                                          v1(ipv4_gid(2, 192, 168, 7, 1)),
                                          ipv4_gid(3, 192, 168, 7, 1),
                                          v1(ipv4_gid(4, 10, 1, 0, 1)),
                                          ipv4_gid(5, 10, 1, 0, 1)};
  const auto chosen = [&](std::vector<verbs::GidEntry> theirs) {
    const auto* entry = verbs::choose_gid(mine, theirs);
    return entry ? entry->index : -1;
  };
  const auto near = ipv4_gid(9, 10, 1, 0, 2), far = ipv4_gid(9, 172, 16, 0, 2);
  CHECK(chosen({link_local, v1(near), near}) == 5);  // in one subnet
  CHECK(chosen({link_local, ipv4_gid(9, 192, 168, 7, 2)}) == 3);
  CHECK(chosen({v1(near)}) == 4);                     // version 1 speaks to version 1
  CHECK((chosen({far}) == 3 || chosen({far}) == 5));  // through a router: any IPv4
  CHECK(chosen({link_local}) == 1);
  verbs::GidEntry global = link_local;
  global.gid[0] = 0x20;
  CHECK(chosen({global}) == -1);
}

TEST_CASE("memory that is used again for something else is registered again") {
  FakeNic nic("nic");
  const auto rails = fake_rails({&nic}, 1);
  verbs::MemoryCache& cache = *rails->memory;
  Bytes segment(1 << 20);
  const auto address = reinterpret_cast<std::uint64_t>(segment.data());
  cache.declare({address, segment.size()});
  const auto key = [&](std::size_t offset) {
    return cache.acquire(segment.data() + offset, 100)->on(0)->rkey;
  };
  const auto first = key(5);
  CHECK(key(500'000) == first);  // once for all of it
  CHECK(nic.registrations == 1);
  {
    const auto in_use = cache.acquire(segment.data(), 10);
    cache.forget(address, segment.size());
    CHECK(nic.registrations == 1);  // not under the feet of a transfer
  }
  CHECK(nic.registrations == 0);
  cache.declare({address, segment.size()});  // the allocator gives out the same address again
  CHECK(key(5) != first);
  cache.forget(address + 4096, 1);  // part of it was unmapped
  CHECK(nic.registrations == 0);
  CHECK(cache.acquire(segment.data(), 10)->on(0).has_value());  // for one transfer
  CHECK(nic.registrations == 0);
}

TEST_CASE("messages longer than a device takes at once go in parts") {
  for (const std::uint32_t most : {4096u, 70'000u, 1u << 30}) {
    FakeNic left("left"), right("right");
    left.port.max_msg_bytes = most;
    Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
    const Bytes from = payload((3 << 20) + 17, most);
    Bytes into(from.size());
    CHECK(pull_over(wire, from, into) == "");
    CHECK(into == from);
    CHECK(left.reads.size() > 1);
    for (const std::uint32_t bytes : left.reads) CHECK(bytes <= most);
  }
}

TEST_CASE("a buffer sent twice stays readable until both messages are through") {
  FakeNic left("left"), right("right");
  Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
  const Bytes from = payload(1 << 20, 6);
  const int before = right.registrations;
  for (const std::uint64_t first : {1, 2}) {  // the messages may end in any order
    MemoryKeys keys[3];
    for (const std::uint64_t id : {1, 2})
      keys[id] = wire.right->expose(id, from.data(), from.size());
    wire.right->conceal(first);
    Bytes into(from.size());
    CHECK(pull_with(wire, keys[3 - first], from, into) == "");
    CHECK(into == from);
    wire.right->conceal(3 - first);
    CHECK(right.registrations == before);
  }
}

TEST_CASE("slots that begin like the one before travel without that, and nothing is lost") {
  FakeNic left("left"), right("right");
  Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
  constexpr std::size_t kFront = FrameHeader::kShortBytes;
  const Bytes fronts[2] = {payload(kFront, 11), payload(kFront, 12)};
  const Bytes bodies = payload(6000, 13);
  std::mt19937 random(14);
  Bytes written[2], read[2];  // by direction
  Stream* const streams[2] = {wire.left.get(), wire.right.get()};
  const auto receive = [&](int way) {
    std::byte piece[500];
    for (std::size_t got; (got = streams[1 - way]->read(piece, sizeof piece)) > 0;)
      read[way].insert(read[way].end(), piece, piece + got);
  };
  for (int i = 0; i < 5000; ++i) {
    const int way = random() % 3 == 0;
    const Bytes& front = fronts[random() % 20 == 0];
    const std::size_t length = random() % 4 == 0 ? random() % bodies.size() : 4096;
    const iovec parts[2] = {{const_cast<std::byte*>(front.data()), kFront},
                            {const_cast<std::byte*>(bodies.data()) + i % 7, length}};
    if (length + 7 > bodies.size()) continue;
    const std::size_t sent = streams[way]->write(parts, 2);
    written[way].insert(written[way].end(), front.begin(), front.begin() + std::min(sent, kFront));
    if (sent > kFront)
      written[way].insert(written[way].end(), bodies.begin() + i % 7,
                          bodies.begin() + i % 7 + (sent - kFront));
    if (random() % 3 == 0) receive(way);
  }
  for (const int way : {0, 1}) {
    receive(way);
    CHECK(read[way] == written[way]);
    const auto& sends = (way == 0 ? left : right).sends;
    CHECK(std::count(sends.begin(), sends.end(), 4096u) > 100);  // one packet each
    CHECK(std::count(sends.begin(), sends.end(), 4096u + 48) > 10);
  }
}

TEST_CASE("a slot without a front has one before it to repeat, or is refused") {
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
  verbs::Endpoint theirs(left_rails, right_rails->published());
  verbs::Endpoint ours(right_rails, left_rails->published());
  const verbs::Card card = ours.card();
  ours.connect(theirs.card());
  int both[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
  const Fd peer(both[0]);
  const auto stream = ours.stream(Fd(both[1]), false);
  REQUIRE(deliver(card.rail[0].qp_number, "words", 5, 7));
  std::byte into[5];
  CHECK_THROWS_AS(stream->read(into, sizeof into), StreamEnd);
}

TEST_CASE("two rails share a long message, and one finishes it where the other fails") {
  for (const bool fails : {false, true}) {
    FakeNic left0("left0"), left1("left1"), right0("right0"), right1("right1");
    int reads = 0;
    if (fails) left1.reaches = [&](std::uint64_t) { return ++reads < 3; };
    Wire wire(fake_rails({&left0, &left1}, 1), fake_rails({&right0, &right1}, 2));
    const Bytes from = payload(20 << 20, 4);
    Bytes into(from.size());
    CHECK(pull_over(wire, from, into) == "");
    CHECK(into == from);
    CHECK(left0.reads.size() > 3);
    CHECK(left1.reads.size() >= 3);
  }
}

TEST_CASE("a device that takes no more work loses its rail, not the connection") {
  for (const Post kind : {Post::send, Post::read, Post::receive}) {
    for (const int before : {0, 1, 7}) {
      FakeNic left0("left0"), left1("left1"), right0("right0"), right1("right1");
      Wire wire(fake_rails({&left0, &left1}, 1), fake_rails({&right0, &right1}, 2));
      for (FakeNic* nic : {&left0, &right0})
        nic->takes = [kind, left = before](Post post) mutable {
          return post != kind || left-- > 0;
        };
      words_on_stderr([&] {
        const Bytes from = payload(2 << 20, 21);
        CHECK(copied(*wire.left, *wire.right, from) == from);
        CHECK(copied(*wire.right, *wire.left, from) == from);
        const Bytes long_one = payload(20 << 20, 22);
        Bytes into(long_one.size());
        CHECK(pull_over(wire, long_one, into) == "");
        CHECK(into == long_one);
      });
      const auto rails = wire.left->describe().rails;
      CHECK_FALSE(rails[0].up);
      CHECK(rails[1].up);
    }
  }
}

TEST_CASE("a device that takes no work at all is an error with a reason") {
  for (const bool from_the_start : {false, true}) {
    FakeNic left("left"), right("right");
    const auto refuse = [](Post post) { return post != Post::send; };
    if (from_the_start) left.takes = refuse;
    Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
    left.takes = refuse;
    std::string reason;
    try {
      const Bytes from = payload(1000, 22);
      copied(*wire.left, *wire.right, from);
    } catch (const StreamEnd& end) {
      reason = end.reason;
    }
    CHECK(contains(reason, "its device took no more work"));
  }
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
  left.takes = [](Post post) { return post != Post::receive; };
  CHECK_THROWS_WITH_AS(verbs::Endpoint(left_rails, right_rails->published()),
                       doctest::Contains("no more receive buffers"), Error);
}

TEST_CASE("an abandoned pull is over only when no device can write any more") {
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
  verbs::Endpoint ours(left_rails, right_rails->published());
  verbs::Endpoint theirs(right_rails, left_rails->published());
  const std::uint32_t number = ours.card().rail[0].qp_number;
  theirs.connect(ours.card());
  ours.connect(theirs.card());
  int both[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
  const auto right_stream = theirs.stream(Fd(both[0]), false);
  const auto stream = ours.stream(Fd(both[1]), true);
  std::byte byte;
  CHECK(right_stream->read(&byte, 1) == 0);  // each hears of the other
  CHECK(stream->read(&byte, 1) == 0);
  right_stream->prepare_sleep(false);
  const iovec one{&byte, 1};
  CHECK(right_stream->write(&one, 1) == 1);
  CHECK(stream->read(&byte, 1) == 1);
  left.holds_reads = true;
  const Bytes from = payload(1 << 20, 23);
  Bytes into(from.size());
  Pull pull{1, into.data(), reinterpret_cast<std::uint64_t>(from.data()), from.size(),
            right_stream->expose(1, from.data(), from.size())};
  REQUIRE(stream->can_pull(pull));
  REQUIRE(stream->pull(pull, true) == Pulled::waiting);
  CHECK_FALSE(stream->abandon(pull));
  // The peer says nonsense: the stream is over, and nobody polls it any more.
  REQUIRE(deliver(number, "words", 5));
  CHECK(stream->abandon(pull));
  CHECK(finish_reads() == 0);
  CHECK(into == Bytes(from.size()));
}

TEST_CASE("memory that a device cannot register is not offered to it") {
  FakeNic left("left"), right("right");
  Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
  right.registers = [](std::uint64_t) { return false; };
  const Bytes from = payload(1 << 20, 4);
  Bytes into(from.size());
  CHECK(pull_over(wire, from, into) == "cannot pull");  // then it is streamed
}

TEST_CASE("declared memory that a NIC registers but does not reach goes through the host's") {
  for (const bool garbled : {false, true}) {
    FakeNic left("left"), right(garbled ? "garbling" : "failing");
    const Bytes chip = payload(1 << 20, 4);
    const auto in_chip = [&](std::uint64_t address) {
      const auto first = reinterpret_cast<std::uint64_t>(chip.data());
      return address >= first && address < first + chip.size();
    };
    if (garbled)
      right.garbles = in_chip;
    else
      right.reaches = [&](std::uint64_t address) { return !in_chip(address); };
    const auto left_rails = fake_rails({&left}, 1), right_rails = fake_rails({&right}, 2);
    Wire wire(left_rails, right_rails);
    const int own = right.registrations;
    const auto address = reinterpret_cast<std::uint64_t>(chip.data());
    const std::string told = words_on_stderr([&] {
      right_rails->memory->declare({address, chip.size() / 2});
      right_rails->memory->declare({address + chip.size() / 2, chip.size() / 2});
      Bytes into(chip.size() / 2);
      const Bytes before = chip;
      CHECK(pull_over(wire, std::span(chip).first(chip.size() / 2), into) == "cannot pull");
      CHECK(pull_over(wire, std::span(chip).last(chip.size() / 2), into) == "cannot pull");
      CHECK(chip == before);
    });
    CHECK(!right_rails->memory->reaches_declared());
    CHECK(count(told, "cannot reach it") == 1);
    CHECK(contains(told, right.name));
    // The host's own memory still goes the short way.
    const Bytes host = payload(1 << 20, 5);
    Bytes into(host.size());
    CHECK(pull_over(wire, host, into) == "");
    CHECK(into == host);
    right_rails->memory->forget(address, chip.size());
    CHECK(right.registrations == own);
  }
}

TEST_CASE("declared memory is read where one of two NICs reaches it, and left as it was") {
  FakeNic left0("left0"), left1("left1"), right0("right0"), right1("unreaching");
  const Bytes chip = payload(4 << 20, 4);
  const auto address = reinterpret_cast<std::uint64_t>(chip.data());
  right1.reaches = [&](std::uint64_t at) { return at < address || at >= address + chip.size(); };
  const auto right_rails = fake_rails({&right0, &right1}, 2);
  Wire wire(fake_rails({&left0, &left1}, 1), right_rails);
  const Bytes before = chip;
  words_on_stderr([&] { right_rails->memory->declare({address, chip.size()}); });
  CHECK(right_rails->memory->reaches_declared());
  CHECK(chip == before);
  Bytes into(chip.size());
  CHECK(pull_over(wire, chip, into) == "");
  CHECK(into == chip);
  CHECK(left1.reads.empty());
}

TEST_CASE("bytes written on one side are read on the other, in order") {
  FakeNic left("left"), right("right");
  Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
  const Bytes from = payload(3 << 20, 5);
  for (const auto& [writer, reader] : {std::pair(wire.left.get(), wire.right.get()),
                                       std::pair(wire.right.get(), wire.left.get())}) {
    CHECK(copied(*writer, *reader, from) == from);
  }
}
