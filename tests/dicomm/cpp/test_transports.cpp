// Which transport connects two ranks, by what each publishes.
#include <doctest/doctest.h>

#include "core/contact.h"
#include "core/host.h"
#include "support.h"
#include "transport/registry.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

std::size_t number(const std::string& name) {
  return name == kAnyTransport ? 0 : transport_index(name) + 1;
}

// The name of the transport that is chosen, or the error.
std::string chosen(const std::string& mine, const std::string& theirs, const std::string& host,
                   const std::string& their_rails = "0") {
  std::vector<std::unique_ptr<Transport>> transports;
  for (const TransportFactory* factory : registered_transports())
    transports.push_back(factory->open(options(0, 2, "tcp")));  // without devices on any machine
  const Contact contact{number(theirs), host, {"l", "10.0.0.3 4242", their_rails}};
  try {
    return registered_transports()[choose_transport(transports, number(mine), contact, 1)]->name();
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

TEST_CASE("two ranks take what one of them asks for, else what suits both best") {
  const std::string here = host_id(), elsewhere = "elsewhere";
  CHECK(chosen("auto", "auto", here) == "shm");
  CHECK(chosen("auto", "auto", elsewhere) == "tcp");
  CHECK(chosen("shm", "auto", here) == "shm");
  for (const std::string other : {"auto", "shm", "tcp", "verbs"}) {
    CHECK(chosen("tcp", other, here) == "tcp");
    CHECK(chosen(other, "tcp", elsewhere) == "tcp");
  }
}

TEST_CASE("what two ranks cannot have is refused in one sentence") {
  const std::string here = host_id(), elsewhere = "elsewhere";
  CHECK(chosen("shm", "auto", elsewhere) ==
        "transport shm was asked for, but rank 1 is on another host (or in another container)");
  CHECK(chosen("shm", "verbs", elsewhere) == chosen("shm", "auto", elsewhere));
  CHECK(chosen("verbs", "shm", here) ==
        "of this rank and rank 1 one asks for transport shm, the other for verbs");
  CHECK(chosen("auto", "verbs", here) ==
        "transport verbs was asked for, but rank 1 has no RDMA device");
  CHECK(chosen("verbs", "auto", here, "1;1") ==
        "transport verbs was asked for, but rank 1's RDMA devices and this rank's do not reach "
        "each other (InfiniBand and Ethernet, RoCE v1 and v2, IPv4 and IPv6)");
}

TEST_CASE("an unknown transport is an error that names those there are") {
  CHECK(transport_names() == std::vector<std::string>{"auto", "shm", "tcp", "verbs"});
  CHECK(known_transport("auto") == "auto");
  CHECK_THROWS_WITH_AS(known_transport("ipx"), "transport 'ipx': expected auto, shm, tcp or verbs",
                       Error);
  CHECK_THROWS_AS(Communicator::create(std::make_shared<MemoryStore>(), options(0, 2, "ipx")),
                  Error);
  ::setenv("DICOMM_TRANSPORT", "ipx", 1);
  CHECK_THROWS_WITH_AS(asked_transport(options(0, 2, kAnyTransport)),
                       "DICOMM_TRANSPORT 'ipx': expected auto, shm, tcp or verbs", Error);
  CHECK(asked_transport(options(0, 2, "tcp")) == "tcp");
  ::unsetenv("DICOMM_TRANSPORT");
}
