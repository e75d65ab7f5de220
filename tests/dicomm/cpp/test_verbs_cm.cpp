// What becomes of a connection where rdma_cm fails. Where it works: tests/verbs.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>

#include "fake_verbs.h"
#include "support.h"
#include "transport/verbs/endpoint.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

constexpr int kPort = 4321;

// Listens, and finds no way to anybody.
std::shared_ptr<const cm::Library> lost_cm() {
  auto library = std::make_shared<cm::Library>();
  library->create_event_channel = [] {
    return new cm::Channel{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  };
  library->destroy_event_channel = [](cm::Channel* channel) {
    ::close(channel->fd);
    delete channel;
  };
  library->create_id = [](cm::Channel*, cm::Id** id, void*, cm::PortSpace) {
    *id = new cm::Id{};
    return 0;
  };
  library->destroy_id = [](cm::Id* id) {
    delete id;
    return 0;
  };
  library->bind_addr = [](cm::Id*, sockaddr*) { return 0; };
  library->listen = [](cm::Id*, int) { return 0; };
  library->get_src_port = [](cm::Id*) { return htons(kPort); };
  library->resolve_addr = [](cm::Id*, sockaddr*, sockaddr*, int) {
    errno = ENETUNREACH;
    return -1;
  };
  library->get_cm_event = [](cm::Channel*, cm::Event**) { return -1; };
  return library;
}

struct Sides {
  explicit Sides(verbs::Connect wish) {
    verbs::Settings settings;
    settings.connect = wish;
    dialling = fake_rails({&nics[0]}, 1, settings);
    accepting = fake_rails({&nics[1]}, 2, settings);
    dialling->cm = accepting->cm = lost_cm();
  }

  // The two ends of a new connection, by what the engine does.
  std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> meet() {
    const std::atomic<bool> called_off{false};
    const Deadline deadline{std::chrono::steady_clock::now() + std::chrono::seconds(20),
                            called_off};
    verbs::Endpoint dialler(dialling, accepting->published());
    verbs::Endpoint acceptor(accepting, verbs::published(dialler.card()));
    acceptor.listen();
    acceptor.connect(dialler.card());
    port_told = acceptor.card().rail[0].cm_port;
    dialler.connect(acceptor.card());
    int both[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
    Fd left(both[0]), right(both[1]);
    std::unique_ptr<Stream> accepted;
    std::thread accepts([&] {
      try {
        if (!acceptor.finished()) acceptor.answer(right, deadline);
        accepted = acceptor.stream(std::move(right), false);
      } catch (const Error&) {  // the dialler gave up
      }
    });
    struct Join {
      std::thread& thread;
      Fd& socket;
      ~Join() {
        if (socket) ::shutdown(socket.get(), SHUT_RDWR);
        thread.join();
      }
    };
    std::unique_ptr<Stream> dialled;
    {
      Join join{accepts, left};
      if (!dialler.finished()) dialler.call(left, deadline);
      dialled = dialler.stream(std::move(left), true);
    }
    return {std::move(dialled), std::move(accepted)};
  }

  FakeNic nics[2] = {FakeNic("dialling"), FakeNic("accepting")};
  std::shared_ptr<verbs::Rails> dialling, accepting;
  int port_told = -1;
};

}  // namespace

TEST_CASE("where rdma_cm finds no way the cards connect a rail, after one warning") {
  Sides sides(verbs::Connect::automatic);
  for (const int port : {kPort, 0}) {  // the second time it is not even tried
    const std::string told = words_on_stderr([&] {
      const auto [dialled, accepted] = sides.meet();
      REQUIRE(dialled);
      REQUIRE(accepted);
      CHECK(sides.port_told == port);
      CHECK(dialled->describe().rails.at(0).connect == "bootstrap");
      Bytes word = payload(100, 3), got(100);
      const iovec part{word.data(), word.size()};
      CHECK(dialled->write(&part, 1) == word.size());
      CHECK(accepted->read(got.data(), got.size()) == got.size());
      CHECK(got == word);
    });
    CHECK(count(told, "rdma_cm cannot connect") == (port ? 1 : 0));
    if (port) CHECK(contains(told, "Network is unreachable"));
  }
}

TEST_CASE("who insists on rdma_cm gets an error where it finds no way") {
  Sides sides(verbs::Connect::cm);
  std::string error;
  try {
    sides.meet();
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  CHECK(contains(error, "connect 'cm' was asked for"));
  CHECK(contains(error, "Network is unreachable"));
}
