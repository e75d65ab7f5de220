// What two sides of a TCP connection come to.
#include <doctest/doctest.h>

#include "core/communicator.h"
#include "transport/tcp/security.h"

using namespace dicomm;

namespace {

SecurityCard from_host(const char* host, Security wanted) { return {0, wanted, sha256(host)}; }

Security agreed_security(const SecurityCard& own, const SecurityCard& peers) {
  return agreed_protection(own, peers).security;
}

}  // namespace

TEST_CASE("unless they say otherwise, hosts protect what passes between them") {
  const SecurityCard here = from_host("here", Security::by_place);
  CHECK(agreed_security(here, from_host("here", Security::by_place)) == Security::none);
  CHECK(agreed_security(here, from_host("there", Security::by_place)) == Security::integrity);
}

TEST_CASE("what one side asks for, the other has to ask for or do anyway") {
  const SecurityCard asks = from_host("here", Security::encryption);
  CHECK(agreed_security(asks, from_host("there", Security::encryption)) == Security::encryption);
  CHECK(agreed_security(from_host("here", Security::none), from_host("here", Security::by_place)) ==
        Security::none);
  for (const Security other : {Security::by_place, Security::none, Security::integrity}) {
    const SecurityCard theirs = from_host("there", other);
    CHECK_THROWS_WITH_AS(agreed_security(asks, theirs), doctest::Contains("encryption here"),
                         Error);
    CHECK_THROWS_WITH_AS(agreed_security(theirs, asks), doctest::Contains("encryption there"),
                         Error);
  }
}

TEST_CASE("both take the cipher that no side is slow with, and the kernel where both have it") {
  SecurityCard own = from_host("here", Security::encryption), peers = own;
  for (const bool here : {false, true})
    for (const bool there : {false, true}) {
      own.fast_aes = here;
      peers.fast_aes = there;
      const Cipher cipher = agreed_protection(own, peers).cipher;
      CHECK(cipher == (here && there ? Cipher::aes_128_gcm : Cipher::chacha20_poly1305));
      CHECK(agreed_protection(peers, own).cipher == cipher);
    }
  own.kernel_tls = true;
  CHECK_FALSE(agreed_protection(own, peers).in_kernel);
  peers.kernel_tls = true;
  CHECK(agreed_protection(own, peers).in_kernel);
  peers.fast_aes = false;
  CHECK_FALSE(agreed_protection(own, peers).in_kernel);
}

TEST_CASE("a card travels as it is, and verbs does not take it for its own") {
  const TransportCard written = SecurityCard::of(Security::integrity).write();
  CHECK(written[0] == 0);
  const SecurityCard read = SecurityCard::read(written);
  CHECK(read.wanted == Security::integrity);
  CHECK(read.host == SecurityCard::of(Security::none).host);
}
