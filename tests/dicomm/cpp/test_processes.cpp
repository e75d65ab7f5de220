// Ranks that are processes: memory that is not shared by accident, and a death.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "processes.h"
#include "transports.h"

using namespace dicomm;
using namespace dicomm::testing;
using namespace std::chrono_literals;

TRANSPORT_TEST_CASE("processes exchange messages of every way to send") {
  const Processes job(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    const int peer = 1 - ranks->rank();
    for (const std::size_t bytes : {0, 8, 9000, 300'000, 5 << 20}) {
      const auto sent = payload(bytes, bytes + ranks->rank());
      Bytes got(bytes);
      const auto send = ranks->isend(sent.data(), bytes, peer, bytes);
      require(ranks->irecv(got.data(), bytes, peer, bytes)->wait() == bytes, "another length");
      send->wait();
      require(!difference(got.data(), bytes, bytes + peer), "other contents");
    }
  });
  CHECK(job.exit_code(0) == 0);
  CHECK(job.exit_code(1) == 0);
}

TRANSPORT_TEST_CASE("a peer whose first thread has ended is still there") {
  const Processes job(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    const int peer = 1 - ranks->rank();
    const auto exchange = [&ranks, peer] {
      for (const std::size_t bytes : {8, 20'000, 3 << 20}) {
        const auto sent = payload(bytes, bytes + ranks->rank());
        Bytes got(bytes);
        const auto send = ranks->isend(sent.data(), bytes, peer, bytes);
        ranks->irecv(got.data(), bytes, peer, bytes)->wait();
        send->wait();
        require(!difference(got.data(), bytes, bytes + peer), "other contents");
      }
    };
    exchange();
    if (ranks->rank() == 1) return exchange();
    std::thread([&] {
      std::this_thread::sleep_for(100ms);  // until the other has ended
      int code = 0;
      try {
        exchange();
      } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        code = 1;
      }
      std::quick_exit(code);
    }).detach();
    ::syscall(SYS_exit, 0);
  });
  CHECK(job.exit_code(0) == 0);
  CHECK(job.exit_code(1) == 0);
}

TRANSPORT_TEST_CASE("a killed peer is an error that names it, not a wait") {
  const Processes job(2, transport, [](const std::shared_ptr<Communicator>& ranks) {
    Bytes data(3 << 20);
    if (ranks->rank() == 0) {
      for (int i = 0; i < 20; ++i) ranks->isend(data.data(), data.size(), 1, 0)->wait();
      ::kill(::getpid(), SIGKILL);
    }
    try {
      while (true) ranks->irecv(data.data(), data.size(), 0, 0)->wait();
    } catch (const PeerError& error) {
      require(std::string(error.what()).find("rank 0") != std::string::npos, error.what());
      require(std::string(error.what()).find("died") != std::string::npos, error.what());
    }
  });
  CHECK(job.exit_code(0) == -1);
  CHECK(job.exit_code(1) == 0);
}
