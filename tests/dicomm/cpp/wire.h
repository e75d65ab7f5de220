// Two sides of a verbs connection over devices of fake_verbs.h, and messages that one side reads
// from the other's memory.
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>

#include "fake_verbs.h"
#include "support.h"
#include "transport/verbs/endpoint.h"

namespace dicomm::testing {

// Both in one process.
struct Wire {
  Wire(std::shared_ptr<verbs::Rails> left_rails, std::shared_ptr<verbs::Rails> right_rails) {
    verbs::Endpoint dialler(left_rails, right_rails->published());
    verbs::Endpoint acceptor(right_rails, left_rails->published());
    acceptor.connect(dialler.card());
    dialler.connect(acceptor.card());
    int both[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
    right = acceptor.stream(Fd(both[0]), false);
    left = dialler.stream(Fd(both[1]), true);
  }

  std::unique_ptr<Stream> left, right;
};

// What arrives of bytes that are written.
inline Bytes copied(Stream& writer, Stream& reader, const Bytes& from) {
  Bytes into(from.size());
  std::size_t written = 0, read = 0;
  for (int turns = 0; read < from.size(); ++turns) {
    REQUIRE(turns < 1'000'000);
    const iovec part{const_cast<std::byte*>(from.data()) + written,
                     std::min<std::size_t>(from.size() - written, 50'000)};
    if (part.iov_len > 0) written += writer.write(&part, 1);
    read += reader.read(into.data() + read, into.size() - read);
    std::byte none;
    CHECK(writer.read(&none, 1) == 0);  // hears what was consumed
  }
  return into;
}

// The right side's memory read into the left side's; what the pull threw, or "".
inline std::string pull_with(Wire& wire, const MemoryKeys& keys, std::span<const std::byte> from,
                             std::span<std::byte> into) {
  Pull pull{1, into.data(), reinterpret_cast<std::uint64_t>(from.data()), from.size(), keys};
  try {
    if (!wire.left->can_pull(pull)) return "cannot pull";
    for (int turns = 0; !pull.done(); ++turns) {
      REQUIRE(turns < 100'000);
      wire.left->pull(pull, true);
    }
  } catch (const StreamEnd& end) {
    return end.reason;
  }
  return "";
}

inline std::string pull_over(Wire& wire, std::span<const std::byte> from,
                             std::span<std::byte> into) {
  const MemoryKeys keys = wire.right->expose(1, from.data(), from.size());
  const std::string thrown = pull_with(wire, keys, from, into);
  wire.right->conceal(1);
  return thrown;
}

}  // namespace dicomm::testing
