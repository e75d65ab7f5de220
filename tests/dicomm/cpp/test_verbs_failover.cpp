// Slots that a failed rail did not bring, or brought too late, over devices of fake_verbs.h.
#include <doctest/doctest.h>

#include "fake_verbs.h"
#include "support.h"
#include "wire.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

// Two rails, of which the right side uses its second, as the left's first word over the other one
// is on its way for long.
struct LateRail {
  LateRail() {
    CHECK(wire.right->read(&byte, 1) == 0);  // hears of what has come
  }

  // As many of the bytes as the window takes.
  std::size_t write(const Bytes& from) {
    std::size_t written = 0;
    while (true) {
      const iovec part{const_cast<std::byte*>(from.data()) + written, from.size() - written};
      const std::size_t more = wire.right->write(&part, 1);
      if (more == 0) return written;
      written += more;
    }
  }
  // What the left side reads within some turns, in which the right hears what was consumed.
  Bytes read() {
    Bytes got;
    Bytes piece(100'000);
    for (int turns = 0; turns < 1000; ++turns) {
      const std::size_t more = wire.left->read(piece.data(), piece.size());
      got.insert(got.end(), piece.begin(), piece.begin() + more);
      CHECK(wire.right->read(&byte, 1) == 0);
    }
    return got;
  }
  void break_second() {
    right1.takes = [](Post post) { return post != Post::send; };
  }

  FakeNic left0 = [] {
    FakeNic nic("left0");
    nic.holds_sends = true;
    return nic;
  }();
  FakeNic left1{"left1"}, right0{"right0"}, right1{"right1"};
  Wire wire{fake_rails({&left0, &left1}, 1), fake_rails({&right0, &right1}, 2)};
  std::byte byte;
};

}  // namespace

TEST_CASE("what a failed rail did not bring goes over one that is heard of later") {
  LateRail rails;
  rails.right1.holds_sends = true;
  const Bytes from = payload(30'000, 31), last = payload(1, 32);
  REQUIRE(rails.write(from) == from.size());
  words_on_stderr([&] {
    rails.break_second();
    CHECK(rails.write(last) == last.size());  // fails there, and is kept
    CHECK(rails.read().empty());
    rails.left0.holds_sends = false;
    finish_sends(rails.left0);
    Bytes all = from;
    all.insert(all.end(), last.begin(), last.end());
    CHECK(rails.read() == all);
  });
}

TEST_CASE("late doubles of a failed rail do not keep the other's window full") {
  LateRail rails;
  rails.left0.holds_sends = false;
  finish_sends(rails.left0);
  const Bytes from = payload(1 << 20, 33);
  const auto part = [&](std::size_t first, std::size_t last) {
    return Bytes(from.begin() + first, from.begin() + last);
  };
  words_on_stderr([&] {
    REQUIRE(rails.write(part(0, 490'000)) == 490'000);  // most of a window, and nobody looks
    rails.break_second();
    REQUIRE(rails.write(part(490'000, 490'001)) == 1);
    Bytes got = rails.read();
    CHECK((got == part(0, 490'001)));
    while (got.size() < from.size()) {
      const std::size_t more = rails.write(part(got.size(), from.size()));
      REQUIRE(more > 0);
      const Bytes next = rails.read();
      CHECK(next.size() == more);
      got.insert(got.end(), next.begin(), next.end());
    }
    CHECK((got == from));
  });
}
