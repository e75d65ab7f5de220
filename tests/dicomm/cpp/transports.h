// Every transport that two ranks of one host can use.
#pragma once

#include <doctest/doctest.h>

#include <utility>

#include "support.h"

namespace dicomm::testing {

inline const std::pair<std::string, Transport> kTransports[] = {{"shm", Transport::shm},
                                                                {"tcp", Transport::tcp}};

}  // namespace dicomm::testing

// A test case that runs once a transport, named `transport` in it.
#define TRANSPORT_TEST_CASE(name) TRANSPORT_TEST_CASE_(DOCTEST_ANONYMOUS(over_transport_), name)
#define TRANSPORT_TEST_CASE_(body, name)                                           \
  static void body(dicomm::Transport transport);                                   \
  TEST_CASE(name) {                                                                \
    for (const auto& [transport_name, transport] : dicomm::testing::kTransports) { \
      INFO("transport " << transport_name);                                        \
      body(transport);                                                             \
    }                                                                              \
  }                                                                                \
  static void body(dicomm::Transport transport)
