// Point-to-point messages between ranks that are threads.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "core/fd.h"
#include "core/frame.h"
#include "transports.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

constexpr std::size_t kSizes[] = {0,
                                  1,
                                  7,
                                  8,
                                  63,
                                  64,
                                  4096,
                                  8191,
                                  8192,
                                  8193,
                                  65535,
                                  65536,
                                  65537,
                                  262143,
                                  262144,
                                  262145,
                                  kChunkBytes,
                                  1048577,
                                  3 * kChunkBytes + 5,
                                  kCreditBytes + 1};

// Memory that ends where a page begins that nobody may touch.
class Brink {
 public:
  explicit Brink(std::size_t bytes) : bytes_(bytes) {
    const std::size_t page = ::sysconf(_SC_PAGESIZE);
    mapped_ = (bytes / page + 1) * page;
    memory_ = static_cast<std::byte*>(::mmap(nullptr, mapped_ + page, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory_ != MAP_FAILED);
    REQUIRE(::mprotect(memory_ + mapped_, page, PROT_NONE) == 0);
    mapped_all_ = mapped_ + page;
  }
  ~Brink() { ::munmap(memory_, mapped_all_); }
  std::byte* data() const { return memory_ + mapped_ - bytes_; }

 private:
  std::size_t bytes_, mapped_, mapped_all_;
  std::byte* memory_;
};

// A long stretch of addresses over little memory: what is written first is written over later.
class Folded {
 public:
  explicit Folded(std::size_t bytes) : bytes_((bytes + kFold - 1) / kFold * kFold) {
    const Fd memory(::memfd_create("folded", MFD_CLOEXEC));
    REQUIRE(::ftruncate(memory.get(), kFold) == 0);
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    REQUIRE(data_ != MAP_FAILED);
    for (std::size_t at = 0; at < bytes_; at += kFold)
      REQUIRE(::mmap(data_ + at, kFold, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     memory.get(), 0) != MAP_FAILED);
  }
  ~Folded() { ::munmap(data_, bytes_); }
  std::byte* data() const { return data_; }

 private:
  static constexpr std::size_t kFold = 16 << 20;

  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace

TRANSPORT_TEST_CASE("every size arrives as it was sent, at any alignment") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    for (const std::size_t bytes : kSizes) {
      Bytes sent = payload(bytes, bytes), got(bytes + 3);
      if (ranks->rank() == 0) {
        CHECK(ranks->isend(sent.data(), bytes, 1, bytes)->wait() == bytes);
      } else {
        const auto request = ranks->irecv(got.data() + 3, bytes, 0, bytes);
        CHECK(request->wait() == bytes);
        CHECK(request->peer() == 0);
        CHECK_FALSE(difference(got.data() + 3, bytes, bytes));
      }
    }
  });
}

TRANSPORT_TEST_CASE("a send reads its own length, whatever the receiver has room for") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    for (const std::size_t bytes : {1, 100, 8193, 300'000}) {
      if (ranks->rank() == 0) {
        const Brink brink(bytes);  // one byte more would be fatal
        fill(brink.data(), bytes, 5);
        CHECK(ranks->isend(brink.data(), bytes, 1, 0)->wait() == bytes);
      } else {
        Bytes roomy(1 << 20);
        CHECK(ranks->irecv(roomy.data(), roomy.size(), 0, 0)->wait() == bytes);
        CHECK_FALSE(difference(roomy.data(), bytes, 5));
        CHECK(roomy[bytes] == std::byte{0});
      }
    }
  });
}

TRANSPORT_TEST_CASE("a receive writes the message's length, up to the last byte there is") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    for (const std::size_t bytes : {1, 100, 8193, 300'000}) {
      const Brink brink(bytes);
      fill(brink.data(), bytes, 6);
      if (ranks->rank() == 0) {
        ranks->isend(brink.data(), bytes, 1, 0)->wait();
      } else {
        std::memset(brink.data(), 0, bytes);
        CHECK(ranks->irecv(brink.data(), bytes, 0, 0)->wait() == bytes);
        CHECK_FALSE(difference(brink.data(), bytes, 6));
      }
    }
  });
}

TRANSPORT_TEST_CASE("an empty message is a message") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    constexpr std::size_t lengths[] = {0, 5, 0, 0, 20'000, 0};
    if (ranks->rank() == 0) {
      for (const std::size_t bytes : lengths)
        CHECK(ranks->isend(payload(bytes, 1).data(), bytes, 1, 0)->wait() == bytes);
      CHECK(ranks->isend(nullptr, 0, 1, 0)->wait() == 0);
    } else {
      Bytes buffer(20'000, std::byte{9});
      for (const std::size_t bytes : lengths)
        CHECK(ranks->irecv(buffer.data(), buffer.size(), 0, 0)->wait() == bytes);
      CHECK(ranks->irecv(nullptr, 0, 0, 0)->wait() == 0);
    }
  });
}

TRANSPORT_TEST_CASE("a message nobody receives holds up none behind it") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    constexpr std::size_t lengths[] = {0, 10, 9000, 300'000, 2 << 20};
    Bytes buffer(2 << 20);
    if (ranks->rank() == 0) {
      std::vector<Bytes> kept;
      std::vector<std::shared_ptr<Request>> unmatched;
      for (const std::size_t bytes : lengths) {
        kept.push_back(payload(bytes, 1));
        unmatched.push_back(ranks->isend(kept.back().data(), bytes, 1, 99));
        ranks->isend(payload(bytes, 2).data(), bytes, 1, 1)->wait();
      }
      ranks->irecv(nullptr, 0, 1, 2)->wait();
      for (const auto& request : unmatched) request->wait();
    } else {
      for (const std::size_t bytes : lengths) {
        CHECK(ranks->irecv(buffer.data(), buffer.size(), 0, 1)->wait() == bytes);
        CHECK_FALSE(difference(buffer.data(), bytes, 2));
      }
      ranks->isend(nullptr, 0, 0, 2)->wait();
      for (const std::size_t bytes : lengths) {  // and they were not lost
        CHECK(ranks->irecv(buffer.data(), buffer.size(), 0, 99)->wait() == bytes);
        CHECK_FALSE(difference(buffer.data(), bytes, 1));
      }
    }
  });
}

TRANSPORT_TEST_CASE(
    "a message that does not fit is an error with both lengths; the next one fits") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    for (const std::size_t bytes : {9, 9000, 2 << 20}) {
      if (ranks->rank() == 0) {
        CHECK(ranks->isend(payload(bytes, 1).data(), bytes, 1, 0)->wait() == bytes);
        ranks->isend("next", 4, 1, 0)->wait();
      } else {
        char small[8] = "before.";
        try {
          ranks->irecv(small, 8, 0, 0)->wait();
          FAIL_CHECK("it fitted");
        } catch (const Error& error) {
          CHECK(std::string(error.what()).find(std::to_string(bytes) + " bytes") !=
                std::string::npos);
          CHECK(std::string(error.what()).find("only 8") != std::string::npos);
        }
        CHECK(std::string(small) == "before.");
        CHECK(ranks->irecv(small, 8, 0, 0)->wait() == 4);
        CHECK(std::string(small, 4) == "next");
      }
    }
  });
}

TRANSPORT_TEST_CASE(
    "receives for one rank and for any get their messages in the order of posting") {
  run_ranks(3, transport, [](const std::shared_ptr<Communicator>& ranks) {
    if (ranks->rank() == 0) {
      int got[4] = {};
      std::shared_ptr<Request> receives[4];
      for (int i = 0; i < 4; ++i)
        receives[i] = ranks->irecv(&got[i], 4, i % 2 ? 2 : Communicator::any_source, 3);
      ranks->isend(nullptr, 0, 1, 4)->wait();
      receives[0]->wait();  // rank 1 was first: rank 2 has not been told yet
      ranks->isend(nullptr, 0, 2, 4)->wait();
      for (const auto& receive : receives) receive->wait();
      CHECK(receives[0]->peer() == 1);
      CHECK(got[0] == 10);
      CHECK(got[1] == 20);
      CHECK(got[2] == 21);
      CHECK(receives[2]->peer() == 2);
      CHECK(got[3] == 22);
    } else {
      ranks->irecv(nullptr, 0, 0, 4)->wait();
      for (int i = 0; i < (ranks->rank() == 1 ? 1 : 3); ++i) {
        const int value = ranks->rank() * 10 + i;
        ranks->isend(&value, 4, 0, 3)->wait();
      }
    }
  });
}

TEST_CASE("a message over 2 GiB") {  // in real memory and over every transport: test_p2p.py
  run_ranks(2, "shm", [](const std::shared_ptr<Communicator>& ranks) {
    constexpr std::size_t last = 12345, bytes = (2ULL << 30) + last;
    const Folded folded(bytes);
    if (ranks->rank() == 0) {
      fill(folded.data(), last, 8);
      CHECK(ranks->isend(folded.data(), bytes, 1, 0)->wait() == bytes);
    } else {
      CHECK(ranks->irecv(folded.data(), bytes, 0, 0)->wait() == bytes);
      CHECK_FALSE(difference(folded.data() + bytes - last, last, 8));
    }
  });
}

TRANSPORT_TEST_CASE("several threads use one communicator") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    run_threads(4, [&](int thread) {
      for (std::size_t i = 0; i < 60; ++i) {
        const std::size_t bytes = i * 997 * (thread + 1) % 40'000;
        Bytes got(bytes);
        const auto receive = ranks->irecv(got.data(), bytes, 1 - ranks->rank(), thread);
        const Bytes sent = payload(bytes, i + thread);
        const auto send = ranks->isend(sent.data(), bytes, 1 - ranks->rank(), thread);
        while (i % 3 == 0 && !receive->test()) {
        }
        CHECK(receive->wait() == bytes);
        CHECK(send->wait() == bytes);
        CHECK_FALSE(difference(got.data(), bytes, i + thread));
      }
    });
  });
}

TRANSPORT_TEST_CASE("receives from any rank are tested by one thread and matched by another") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    constexpr int count = 300;
    if (ranks->rank() == 1) {
      for (int i = 0; i < count; ++i) ranks->isend(&i, 4, 0, i % 2)->wait();
      return;
    }
    run_threads(2, [&](int tag) {
      for (int i = tag; i < count; i += 2) {
        int got = -1;
        const auto request = ranks->irecv(&got, 4, Communicator::any_source, tag);
        while (!request->test()) {
        }
        CHECK(got == i);
        CHECK(request->peer() == 1);
      }
    });
  });
}

TRANSPORT_TEST_CASE("a paced link delivers by latency and bandwidth") {
  run_ranks(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    constexpr std::int64_t start = 10'000'000'000, transfer = 1'000'000, latency = 2'000'000;
    char buffer[1000] = {};
    if (ranks->rank() == 0) {
      ranks->set_link(1, {.latency_s = 2e-3, .bytes_per_s = 1e6});
      for (const std::int64_t ready : {start, start, start + 500'000'000})
        ranks->isend(buffer, sizeof buffer, 1, 0, ready)->wait();
    } else {
      for (const std::int64_t expected :
           {start + transfer + latency, start + 2 * transfer + latency,
            start + 500'000'000 + transfer + latency}) {
        const auto request = ranks->irecv(buffer, sizeof buffer, 0, 0);
        request->wait();
        CHECK(request->delivered_at_ns() == expected);
      }
    }
  });
}
