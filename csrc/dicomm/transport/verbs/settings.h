// What can be set about verbs: Options first, then the environment, then these defaults.
#pragma once

#include <optional>
#include <string>

#include "core/communicator.h"

namespace dicomm::verbs {

enum class Connect { automatic, cm, bootstrap };

struct Settings {
  std::string nics;              // device[:port],...; empty: the nearest ones
  std::optional<int> gid_index;  // else the best for the peer
  std::optional<int> mtu_bytes;  // else the largest both ports have
  int traffic_class = 0;         // RoCE: what switches tell priorities by
  int hop_limit = 64;            // 1 would not survive a router
  int timeout = 14;              // of an unanswered packet: 4.096 us * 2^timeout = 67 ms
  int retry_count = 6;           // 3 bits; rxe takes 7 as for ever
  int rnr_retry = 6;             // 3 bits; 7 is for ever
  Connect connect = Connect::automatic;
  std::string ibverbs_library = "libibverbs.so.1";
  std::string rdmacm_library = "librdmacm.so.1";
};

// These two throw Error with one sentence about a bad value.
Settings settings(const Options& options);
Transport transport(const Options& options);

}  // namespace dicomm::verbs
