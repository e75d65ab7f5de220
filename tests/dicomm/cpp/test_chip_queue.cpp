// Messages that wait for a chip: sends for their bytes, receives for their buffer.
#include <atomic>
#include <future>
#include <stdexcept>

#include "core/chip_buffer.h"
#include "transports.h"

using namespace dicomm;
using namespace dicomm::testing;
using namespace std::chrono_literals;

namespace {

struct Work final : ChipWork {
  bool done() override {
    if (failed) throw std::runtime_error("it overheated");
    return through;
  }
  std::atomic<bool> through{false}, failed{false};
};

// A receiver's buffer on a chip that reaches no memory of a peer.
struct Buffer final : ChipBuffer {
  const MemoryHandle& handle() const override { return none; }
  std::shared_ptr<ChipWork> pull(const MemoryHandle&, std::size_t) override { return nullptr; }
  OnHost on_host() override {
    before();
    return {bytes.data(), nullptr};
  }
  explicit Buffer(std::size_t size) : bytes(size) {}

  MemoryHandle none{};
  Bytes bytes;
  std::function<void()> before = [] {};
};

void tell(Communicator& ranks, std::uint64_t tag) {
  ranks.isend(nullptr, 0, 1 - ranks.rank(), tag)->wait();
}
void hear(Communicator& ranks, std::uint64_t tag) {
  ranks.irecv(nullptr, 0, 1 - ranks.rank(), tag)->wait();
}

}  // namespace

TRANSPORT_TEST_CASE("a send that waits for its chip keeps its place, and holds up no other tag") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    constexpr std::size_t lengths[] = {4, 3 << 20, 4};
    if (ranks->rank() == 1) {
      hear(*ranks, 8);
      tell(*ranks, 8);
      for (int i = 0; i < 3; ++i) {
        Bytes got(lengths[i]);
        ranks->recv(got.data(), got.size(), 0, 7);
        CHECK_FALSE(difference(got.data(), got.size(), i));
      }
      tell(*ranks, 9);
      return;
    }
    const auto first = std::make_shared<Work>(), last = std::make_shared<Work>();
    Bytes late(lengths[0]), second = payload(lengths[1], 1), third = payload(lengths[2], 2);
    const std::shared_ptr<Request> sends[] = {
        ranks->isend(late.data(), late.size(), 1, 7, 0, first),
        ranks->isend(second.data(), second.size(), 1, 7),
        ranks->isend(third.data(), third.size(), 1, 7, 0, last),
    };
    last->through = true;
    tell(*ranks, 8);
    hear(*ranks, 8);
    for (const auto& send : sends) CHECK_FALSE(send->test());
    fill(late.data(), late.size(), 0);
    first->through = true;
    hear(*ranks, 9);  // nobody waits for the sends
    for (const auto& send : sends) send->wait();
  });
}

TRANSPORT_TEST_CASE("a send that waits for its chip can be given up") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) {
      Bytes got(4);
      ranks->recv(got.data(), got.size(), 0, 7);
      CHECK_FALSE(difference(got.data(), got.size(), 2));
      return;
    }
    const auto work = std::make_shared<Work>();
    auto given_up = std::make_unique<Bytes>(3 << 20);
    auto request = ranks->isend(given_up->data(), given_up->size(), 1, 7, 0, work);
    const Bytes next = payload(4, 2);
    const auto after = ranks->isend(next.data(), next.size(), 1, 7);
    CHECK_THROWS_WITH_AS(request->wait(20ms), doctest::Contains("chip has yet to get there"),
                         TimeoutError);
    request.reset();
    given_up.reset();
    after->wait();
  });
}

TRANSPORT_TEST_CASE("a chip that fails takes only its own message along") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) return hear(*ranks, 7);
    const auto work = std::make_shared<Work>();
    const auto request = ranks->isend("lost", 4, 1, 7, 0, work);
    work->failed = true;
    CHECK_THROWS_WITH_AS(request->wait(), doctest::Contains("it overheated"), Error);
    tell(*ranks, 7);
  });
}

TRANSPORT_TEST_CASE("a peer that leaves, or an abort, ends sends that wait for their chip") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) {
      hear(*ranks, 7);
      tell(*ranks, 9);
      CHECK_THROWS_WITH_AS(hear(*ranks, 10), doctest::Contains("not a number"), PeerError);
      return;
    }
    const auto work = std::make_shared<Work>();
    const auto request = ranks->isend("lost", 4, 1, 8, 0, work);
    tell(*ranks, 7);
    hear(*ranks, 9);  // an abort that comes before a message is received fails it, too
    ranks->abort("the loss is not a number");
    CHECK_THROWS_WITH_AS(request->wait(), doctest::Contains("not a number"), AbortedError);
    work->through = true;
    CHECK_THROWS_AS(ranks->isend("lost", 4, 1, 8, 0, work)->wait(), AbortedError);
  });
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) {
      hear(*ranks, 7);
      return ranks->close();
    }
    const auto request = ranks->isend("lost", 4, 1, 8, 0, std::make_shared<Work>());
    tell(*ranks, 7);
    CHECK_THROWS_WITH_AS(request->wait(), doctest::Contains("rank 1"), PeerError);
  });
}

TRANSPORT_TEST_CASE("a receive does not touch its buffer before the chip is through with it") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) {
      for (int i = 0; i < 3; ++i) {
        const Bytes sent = payload(64, i);
        ranks->isend(sent.data(), 64, 0, 7)->wait();
      }
      return tell(*ranks, 8);
    }
    const auto work = std::make_shared<Work>();
    Bytes first(64), second(64), third(64);
    const std::shared_ptr<Request> receives[] = {
        ranks->irecv(first.data(), 64, 1, 7, work),
        ranks->irecv(second.data(), 64, Communicator::any_source, 7),
    };
    hear(*ranks, 8);  // what was sent before is here
    for (const auto& receive : receives) CHECK_FALSE(receive->test());
    CHECK(first == Bytes(64));
    work->through = true;
    ranks->recv(third.data(), 64, 1, 7);
    for (const auto& receive : receives) CHECK(receive->wait() == 64);
    CHECK_FALSE(difference(first.data(), 64, 0));
    CHECK_FALSE(difference(second.data(), 64, 1));
    CHECK_FALSE(difference(third.data(), 64, 2));
  });
}

TRANSPORT_TEST_CASE("a receive that waits for its chip gets what came before its peer left") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) {
      const Bytes sent = payload(64, 1);
      ranks->isend(sent.data(), 64, 0, 7)->wait();
      return ranks->close();
    }
    const auto work = std::make_shared<Work>();
    Bytes got(64), none(64);
    const auto receive = ranks->irecv(got.data(), 64, 1, 7, work);
    const auto in_vain = ranks->irecv(none.data(), 64, 1, 7);
    CHECK_THROWS_AS(ranks->recv(none.data(), 64, 1, 8), PeerError);
    CHECK_FALSE(receive->test());
    work->through = true;
    CHECK(receive->wait() == 64);
    CHECK_FALSE(difference(got.data(), 64, 1));
    CHECK_THROWS_WITH_AS(in_vain->wait(), doctest::Contains("rank 1"), PeerError);
  });
}

TRANSPORT_TEST_CASE("a chip that cannot receive a message fails that receive and nothing else") {
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{3 << 20}})
    run_ranks(2, transport, [&](const std::shared_ptr<Communicator>& ranks) {
      const Bytes sent = payload(bytes, 1);
      if (ranks->rank() == 1) {
        const auto lost = ranks->isend(sent.data(), bytes, 0, 7);
        const auto kept = ranks->isend(sent.data(), bytes, 0, 7);
        tell(*ranks, 8);
        lost->wait(20s);
        kept->wait(20s);
        return hear(*ranks, 9);
      }
      hear(*ranks, 8);  // the messages are here, or offered
      const auto full = std::make_shared<Buffer>(bytes), empty = std::make_shared<Buffer>(bytes);
      full->before = [] { throw std::runtime_error("it is full"); };
      const auto failed = ranks->irecv(full, bytes, 1, 7);
      CHECK_THROWS_WITH_AS(failed->wait(20s), doctest::Contains("it is full"), Error);
      CHECK(ranks->irecv(empty, bytes, 1, 7)->wait(20s) == bytes);
      CHECK(empty->bytes == sent);
      tell(*ranks, 9);
    });
}

// Its allocator calls in with a mutex held that the chip's buffers need, too.
TRANSPORT_TEST_CASE(
    "a chip's memory is declared and forgotten while a message waits for the chip") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    constexpr std::size_t kBytes = 3 << 20;
    const Bytes sent = payload(kBytes, 1);
    if (ranks->rank() == 1) {
      const auto send = ranks->isend(sent.data(), kBytes, 0, 7);
      tell(*ranks, 8);
      return hear(*ranks, 9);
    }
    hear(*ranks, 8);
    Bytes segment(1 << 16);
    std::future<void> allocator;
    const auto buffer = std::make_shared<Buffer>(kBytes);
    buffer->before = [&] {
      if (allocator.valid()) return;
      allocator = std::async(std::launch::async, [&] {
        const auto address = reinterpret_cast<std::uint64_t>(segment.data());
        ranks->declare_memory({address, segment.size(), nullptr});
        ranks->forget_memory(address, segment.size());
      });
      CHECK(allocator.wait_for(10s) == std::future_status::ready);
    };
    CHECK(ranks->irecv(buffer, kBytes, 1, 7)->wait(20s) == kBytes);
    CHECK(buffer->bytes == sent);
    tell(*ranks, 9);
  });
}
