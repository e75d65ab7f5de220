// Both sides of the handshake, talked to by someone who knows the secret or does not.
#include "core/handshake.h"

#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "core/communicator.h"

namespace {

using namespace dicomm;

const Identity kMe{
    .rank = 0, .world_size = 3, .name = "n", .label = "", .host = "h", .secret = "s"};

void expect(bool holds) {
  if (!holds) std::abort();
}

struct Sockets {
  Fd ours, theirs;

  Sockets() {
    int both[2];
    expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
    ours = Fd(both[0]);
    theirs = Fd(both[1]);
  }

  bool say(const void* words, std::size_t bytes) const {
    return ::send(theirs.get(), words, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes);
  }
};

// A hello that the pending connection may well accept, but for what the input changes in it.
Hello plausible_hello(FuzzedDataProvider& input) {
  Hello hello{};
  std::memcpy(hello.magic, "dicommhs", 8);
  hello.version = input.ConsumeIntegralInRange<std::uint32_t>(0, 6);
  hello.rank = input.ConsumeBool() ? 1 : input.ConsumeIntegral<std::int32_t>();
  hello.to_rank = input.ConsumeBool() ? 0 : input.ConsumeIntegral<std::int32_t>();
  hello.world_size = input.ConsumeBool() ? 3 : input.ConsumeIntegral<std::int32_t>();
  hello.name = sha256(input.ConsumeBool() ? "n" : "another");
  const auto fill = [&](char (&field)[64]) { input.ConsumeData(field, sizeof field); };
  fill(hello.label);
  fill(hello.host);
  return hello;
}

// Words in pieces; the pending connection looks at each.
PendingConnection::State say(FuzzedDataProvider& input, const Sockets& sockets,
                             PendingConnection& pending, std::string words) {
  auto state = PendingConnection::State::talking;
  while (!words.empty() && state == PendingConnection::State::talking) {
    const auto piece = input.ConsumeIntegralInRange<std::size_t>(1, words.size());
    if (!sockets.say(words.data(), piece)) return PendingConnection::State::refused;
    words.erase(0, piece);
    state = pending.advance(kMe);
  }
  return state;
}

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

void visit_pending(FuzzedDataProvider& input) {
  Sockets sockets;
  const std::size_t door = input.ConsumeBool();
  PendingConnection pending(std::move(sockets.ours), door);
  if (input.ConsumeBool()) {  // no idea of the protocol
    expect(say(input, sockets, pending, input.ConsumeRemainingBytesAsString()) !=
           PendingConnection::State::proven);
    return;
  }
  const Hello mine = plausible_hello(input);
  if (say(input, sockets, pending, bytes_of(mine)) != PendingConnection::State::talking) return;
  Hello theirs{};
  expect(::recv(sockets.theirs.get(), &theirs, sizeof theirs, MSG_DONTWAIT) == sizeof theirs);
  const bool knows = input.ConsumeBool();
  ProofMessage mine_proven{};
  input.ConsumeData(mine_proven.card.data(), 16);
  mine_proven.proof = hmac_sha256(knows ? "s" : "t", "dialler" + bytes_of(mine) + bytes_of(theirs) +
                                                         bytes_of(mine_proven.card));
  const bool changed = input.ConsumeBool();
  if (changed)
    reinterpret_cast<std::uint8_t*>(
        &mine_proven)[input.ConsumeIntegralInRange<std::size_t>(0, sizeof mine_proven - 1)] ^=
        1 << (input.ConsumeIntegral<std::uint8_t>() % 8);
  const auto state =
      say(input, sockets, pending, bytes_of(mine_proven) + input.ConsumeRemainingBytesAsString());
  expect((state == PendingConnection::State::proven) == (knows && !changed));
  if (state != PendingConnection::State::proven) return;
  const bool fits = mine.rank > 0 && mine.rank < 3 && mine.to_rank == 0 && mine.world_size == 3 &&
                    mine.name == sha256("n");
  expect((pending.verdict() == Verdict::welcome) == fits);
  pending.peer().describe();
  expect(pending.answer(kMe, pending.verdict(), Fd(), {}));
}

// The dialler meets a listener that does not know the secret.
void visit_dialler(FuzzedDataProvider& input) {
  Sockets sockets;
  std::string words;
  if (input.ConsumeBool()) words = bytes_of(plausible_hello(input));
  words += input.ConsumeRemainingBytesAsString();
  if (!sockets.say(words.data(), words.size())) return;
  ::shutdown(sockets.theirs.get(), SHUT_WR);
  const std::atomic<bool> never{false};
  try {
    dial_handshake(sockets.ours, kMe, 1,
                   {std::chrono::steady_clock::now() + std::chrono::seconds(5), never});
    expect(false);
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  FuzzedDataProvider input(data, bytes);
  if (input.ConsumeBool())
    visit_pending(input);
  else
    visit_dialler(input);
  return 0;
}
