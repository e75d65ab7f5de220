// Proving to each other who one is.
#include <dirent.h>
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>
#include <future>

#include "core/communicator.h"
#include "core/contact.h"
#include "core/handshake.h"
#include "support.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

Identity identity(int rank, const std::string& secret = "s", int world_size = 3) {
  return {rank, world_size, "name", "", "host", secret};
}

struct Sockets {
  Fd acceptor, dialler;

  Sockets() {
    int both[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
    acceptor = Fd(both[0]);
    dialler = Fd(both[1]);
  }
};

// What a dialler ends with: "welcome", "crossed", or the error.
std::string dial(const Fd& socket, const Identity& me, int to_rank) {
  const std::atomic<bool> never{false};
  const Deadline deadline{std::chrono::steady_clock::now() + std::chrono::seconds(10), never};
  try {
    const Dialled dialled = dial_handshake(socket, me, to_rank, deadline);
    return dialled.verdict == Verdict::welcome ? "welcome" : "crossed";
  } catch (const Error& error) {
    return error.what();
  }
}

// A pending connection, talked to until it is proven or refused; answered with its own verdict, or
// `instead`.
std::string meet(const Identity& acceptor, const Identity& dialler, int to_rank,
                 std::optional<Verdict> instead = std::nullopt) {
  Sockets sockets;
  auto told = std::async(std::launch::async, [&, socket = std::move(sockets.dialler)] {
    return dial(socket, dialler, to_rank);
  });
  {
    PendingConnection pending(std::move(sockets.acceptor), 0);
    auto state = PendingConnection::State::talking;
    while (state == PendingConnection::State::talking) state = pending.advance(acceptor);
    if (state == PendingConnection::State::proven)
      CHECK(pending.answer(acceptor, instead.value_or(pending.verdict()), Fd()));
  }
  return told.get();
}

// What an acceptor learns of a dialler.
PeerIdentity peer_of(const Identity& acceptor, const Identity& dialler) {
  Sockets sockets;
  auto told = std::async(std::launch::async, [&, socket = std::move(sockets.dialler)] {
    return dial(socket, dialler, acceptor.rank);
  });
  PendingConnection pending(std::move(sockets.acceptor), 0);
  auto state = PendingConnection::State::talking;
  while (state == PendingConnection::State::talking) state = pending.advance(acceptor);
  CHECK(pending.answer(acceptor, Verdict::welcome, Fd()));
  CHECK(told.get() == "welcome");
  return pending.peer();
}

}  // namespace

TEST_CASE("ranks of one job welcome each other; others are told, or hung up on") {
  CHECK(meet(identity(0), identity(1), 0) == "welcome");
  CHECK(meet(identity(0), identity(1), 0, Verdict::crossed) == "crossed");
  CHECK(contains(meet(identity(0), identity(1, "t"), 0), "secrets differ"));
  CHECK(contains(meet(identity(0), identity(1), 2), "another rank"));
  CHECK(contains(meet(identity(0), identity(0), 0), "another rank"));
  CHECK(contains(meet(identity(0), identity(7, "s", 8), 0), "another world size"));
  CHECK(contains(meet(identity(0), identity(1), 0, Verdict::duplicate), "two processes"));
}

TEST_CASE("a label is cut between characters, and whatever a peer calls itself is UTF-8") {
  const auto label_of = [](std::string label) {
    Identity other = identity(1);
    other.label = std::move(label);
    return peer_of(identity(0), other).label;
  };
  std::string long_label = "12", cut = "12";
  for (int i = 0; i < 30; ++i) long_label += "\u82af";  // 3 bytes each
  for (int i = 0; i < 20; ++i) cut += "\u82af";         // 62 bytes: one more does not fit in 63
  CHECK(label_of(long_label) == cut);
  CHECK(label_of("r\u00e9") == "r\u00e9");
  CHECK(label_of("\xff!") == "\ufffd!");
  CHECK(label_of("\xe8\x8a") == "\ufffd\ufffd");              // cut short
  CHECK(label_of("\xc0\xaf") == "\ufffd\ufffd");              // longer than it needs to be
  CHECK(label_of("\xed\xa0\x80") == "\ufffd\ufffd\ufffd");    // half of a pair
  CHECK(label_of("\xf0\x9f\x98\x80") == "\xf0\x9f\x98\x80");  // outside the basic plane
  CHECK(label_of("\xf5\x80\x80\x80").starts_with("\ufffd"));
}

TEST_CASE("a listener gets no descriptors into a dialler") {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  Sockets sockets;
  Hello hello{};
  std::memcpy(hello.magic, "dicommhs", 8);
  iovec part{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(8 * sizeof(int));
  int fds[8];
  for (int& fd : fds) fd = sockets.acceptor.get();
  std::memcpy(CMSG_DATA(rights), fds, sizeof fds);
  const auto before = descriptors();
  REQUIRE(::sendmsg(sockets.acceptor.get(), &message, 0) == sizeof hello);
  ::shutdown(sockets.acceptor.get(), SHUT_WR);
  CHECK_FALSE(dial(sockets.dialler, identity(1), 0).empty());
  CHECK(descriptors() == before);
}

TEST_CASE("contacts are read back as written; anything else is named") {
  Contact contact;
  contact.asked = 2;
  contact.host_id = "h";
  contact.words = {"l", "::1 65535", "0"};
  CHECK(contact.encode() == "dicomm-contact-3 2 h l ::1 65535 0");
  const Contact again = Contact::decode(contact.encode(), 1);
  CHECK(again.encode() == contact.encode());
  CHECK(again.words == contact.words);
  CHECK(again.where() == "[::1]:65535");
  for (const std::string& wrong :
       {std::string(), std::string("\xff\0nonsense", 10), contact.encode().substr(3),
        std::string("dicomm-contact-1 1 a b c 1 0"), std::string("dicomm-contact-3 9 a b c 1 0"),
        std::string("dicomm-contact-3 1 a b c 0 0"),
        std::string("dicomm-contact-3 1 a b c 65536 0"), std::string("dicomm-contact-3 1 a b c 1"),
        std::string("dicomm-contact-3 -1 a b c 1 0")}) {
    try {
      Contact::decode(wrong, 4);
      FAIL_CHECK("accepted: " << wrong);
    } catch (const Error& error) {
      CHECK(contains(error.what(), "rank 4"));
    }
  }
}
