// Every transport that two ranks of one host can use.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "support.h"

namespace dicomm::testing {

inline const std::string kTransports[] = {"shm", "tcp"};

}  // namespace dicomm::testing

// A test case that runs once a transport, named `transport` in it.
#define TRANSPORT_TEST_CASE(name) TRANSPORT_TEST_CASE_(DOCTEST_ANONYMOUS(over_transport_), name)
#define TRANSPORT_TEST_CASE_(body, name)                                \
  static void body(const std::string& transport);                       \
  TEST_CASE(name) {                                                     \
    for (const std::string& transport : dicomm::testing::kTransports) { \
      INFO("transport " << transport);                                  \
      body(transport);                                                  \
    }                                                                   \
  }                                                                     \
  static void body(const std::string& transport)
