// Deadlines, cancelling, aborting, closing.
#include <string>

#include "core/frame.h"
#include "transports.h"

using namespace dicomm;
using namespace dicomm::testing;
using namespace std::chrono_literals;

namespace {

// What the call threw, as an E; fails where it threw something else or nothing.
template <class E, class F>
std::string error_of(F&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    FAIL_CHECK("another error: " << error.what());
    return "";
  }
  FAIL_CHECK("no error");
  return "";
}

void connect(const std::shared_ptr<Communicator>& ranks) {
  const int peer = 1 - ranks->rank();
  const auto send = ranks->isend(nullptr, 0, peer, 1000);
  ranks->irecv(nullptr, 0, peer, 1000)->wait();
  send->wait();
}

}  // namespace

TRANSPORT_TEST_CASE("a wait ends at its deadline, says what for, and may be taken up again") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 1) {
      ranks->irecv(nullptr, 0, 0, 1)->wait();
      ranks->isend("late", 4, 0, 17)->wait();
      return;
    }
    char buffer[100];
    const auto request = ranks->irecv(buffer, sizeof buffer, 1, 17);
    const auto error = error_of<TimeoutError>([&] { request->wait(20ms); });
    CHECK(contains(error, "rank 1"));
    CHECK(contains(error, "tag 17"));
    CHECK(contains(error, "100 bytes"));
    error_of<TimeoutError>([&] { request->wait(0ms); });
    CHECK_FALSE(request->test());
    ranks->isend(nullptr, 0, 1, 1)->wait();
    CHECK(request->wait() == 4);
  });
}

TRANSPORT_TEST_CASE("the longest deadline there is, is one") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    char byte = 'x';
    if (ranks->rank() == 0)
      ranks->isend(&byte, 1, 1, 0)->wait(std::chrono::milliseconds::max());
    else
      CHECK(ranks->irecv(&byte, 1, 0, 0)->wait(std::chrono::milliseconds::max()) == 1);
  });
}

TRANSPORT_TEST_CASE("cancelled sends give back what they were promised") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    connect(ranks);
    const Bytes data = payload(8000, 1);
    if (ranks->rank() == 0) {
      // More than what may be under way unreceived, if each kept its share.
      for (std::size_t i = 0; i < 3 * kCreditBytes / data.size(); ++i)
        ranks->isend(data.data(), data.size(), 1, 5);
      ranks->isend(nullptr, 0, 1, 6)->wait();
      ranks->irecv(nullptr, 0, 1, 7)->wait();
      // Nobody receives this one yet: it is done only because it may go out unasked.
      CHECK(ranks->isend("x", 1, 1, 8)->wait(5s) == 1);
      ranks->isend(nullptr, 0, 1, 9)->wait();
    } else {
      ranks->irecv(nullptr, 0, 0, 6)->wait();
      Bytes got(data.size());
      std::vector<std::shared_ptr<Request>> receives;
      while (true) {  // what was not cancelled in time
        const auto request = ranks->irecv(got.data(), got.size(), 0, 5);
        try {
          request->wait(200ms);
        } catch (const TimeoutError&) {
          break;
        } catch (const Error& error) {
          CHECK(contains(error.what(), "took the message back"));
        }
      }
      ranks->isend(nullptr, 0, 0, 7)->wait();
      ranks->irecv(nullptr, 0, 0, 9)->wait();
      char byte = 0;
      CHECK(ranks->irecv(&byte, 1, 0, 8)->wait() == 1);
    }
  });
}

TRANSPORT_TEST_CASE("a cancelled request's buffer is the caller's at once") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    connect(ranks);
    constexpr std::size_t bytes = 5 << 20;
    if (ranks->rank() == 0) {
      for (int i = 0; i < 30; ++i) {
        auto data = std::make_unique<Bytes>(payload(bytes, i));
        auto request = ranks->isend(data->data(), bytes, 1, 1);
        if (i % 2) request->test();
        request.reset();
        data.reset();
      }
      ranks->isend(nullptr, 0, 1, 2)->wait();
    } else {
      const auto end = ranks->irecv(nullptr, 0, 0, 2);
      for (int i = 0; !end->test(); ++i) {
        auto got = std::make_unique<Bytes>(bytes);
        auto request = ranks->irecv(got->data(), bytes, 0, 1);
        try {
          if (i % 3) {
            request->wait(1ms);
            CHECK((*got)[bytes - 1] != std::byte{0});
          }
        } catch (const Error& error) {
          CHECK((contains(error.what(), "took the message back") ||
                 contains(error.what(), "not done after")));
        }
      }
    }
  });
}

TRANSPORT_TEST_CASE("an abort names its reason to everyone, before and after") {
  run_ranks(3, transport, [](const std::shared_ptr<Communicator>& ranks) {
    const auto pending = ranks->irecv(nullptr, 0, Communicator::any_source, 1);
    if (ranks->rank() == 0) {
      for (const int peer : {1, 2}) ranks->irecv(nullptr, 0, peer, 0)->wait();
      ranks->abort("the loss is not a number");
      CHECK(contains(error_of<AbortedError>([&] { pending->wait(10s); }), "not a number"));
      CHECK(contains(error_of<AbortedError>([&] { ranks->isend("x", 1, 1, 0)->wait(); }),
                     "not a number"));
    } else {
      ranks->isend(nullptr, 0, 0, 0)->wait();
      CHECK(contains(error_of<PeerError>([&] { pending->wait(10s); }), "not a number"));
      CHECK(contains(error_of<PeerError>([&] { ranks->isend("x", 1, 0, 0)->wait(); }),
                     "not a number"));
    }
    CHECK(contains(ranks->failure(), "not a number"));
  });
}

TRANSPORT_TEST_CASE(
    "whoever waits while another thread closes gets an error, and may free at once") {
  for (int round = 0; round < 20; ++round) {
    run_ranks(2, transport, [&](const std::shared_ptr<Communicator>& ranks) {
      connect(ranks);
      run_threads(3, [&](int thread) {
        if (thread == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
          return ranks->close();
        }
        try {
          for (std::size_t i = 0; i < 1000; ++i) {
            const Bytes data = payload(i % 2 ? 300'000 : 100, i);
            Bytes got(data.size());
            const int peer = 1 - ranks->rank();
            const auto receive = ranks->irecv(got.data(), got.size(), peer, thread);
            ranks->isend(data.data(), data.size(), peer, thread)->wait();
            receive->wait();
          }
        } catch (const Error&) {  // closed here, or there
        }
      });
    });
  }
}

TRANSPORT_TEST_CASE("a rank that leaves is not a rank that died, and its last words count") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 0) {
      ranks->isend("123", 3, 1, 1)->wait();
      ranks->close();
      CHECK(
          contains(error_of<AbortedError>([&] { ranks->isend("x", 1, 1, 0)->wait(); }), "closed"));
      return;
    }
    char buffer[8];
    const auto error =
        error_of<PeerError>([&] { ranks->irecv(buffer, sizeof buffer, 0, 2)->wait(); });
    CHECK(contains(error, "left"));
    CHECK_FALSE(contains(error, "died"));
    CHECK(ranks->irecv(buffer, sizeof buffer, 0, 1)->wait() == 3);
  });
}

TEST_CASE("a rank alone needs nobody") {
  const auto alone = Communicator::create(std::make_shared<MemoryStore>(), Options{});
  error_of<Error>([&] { alone->isend(nullptr, 0, 0, 0); });
  alone->close();
  alone->close();
}

TEST_CASE("impossible options are refused in one sentence") {
  const auto refused = [](auto change) {
    Options asked = options(0, 2, kAnyTransport);
    change(asked);
    return error_of<Error>([&] { Communicator::create(std::make_shared<MemoryStore>(), asked); });
  };
  CHECK(contains(refused([](Options& o) { o.rank = 2; }), "0 <= rank < world_size"));
  CHECK(contains(refused([](Options& o) { o.secret = ""; }), "secret is empty"));
  CHECK(contains(refused([](Options& o) { o.timeout = 0ms; }), "timeout must be positive"));
  CHECK(
      contains(refused([](Options& o) { o.listen_address = "not an address"; }), "cannot listen"));
}
