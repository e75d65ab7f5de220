// What can be set about verbs: Options first, then the environment, then these defaults.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/communicator.h"

namespace dicomm::verbs {

// Queue pairs by exchange over the bootstrap, by rdma_cm where both sides have it, or by rdma_cm
// only.
enum class Connect : std::uint8_t { bootstrap, automatic, cm };

struct Settings {
  std::string nics;                  // device[:port],...; empty: the nearest ones
  std::optional<int> gid_index;      // else the best for the peer
  std::optional<int> mtu_bytes;      // else the largest both ports have
  std::optional<int> traffic_class;  // RoCE: what switches tell priorities by; else 0
  std::optional<int> hop_limit;      // else 64, or the routing table's (rdma_cm)
  int timeout = 14;                  // of an unanswered packet: 4.096 us * 2^timeout = 67 ms
  int retry_count = 6;               // 3 bits; rxe takes 7 as for ever
  // How often a slot is sent again where the peer has no receive buffer; 7 is for ever. The peer's
  // buffers serve all who send to it, and may be short without anything being wrong. A peer that is
  // dead is found all the same: it answers nothing (retry_count), and its socket closes. One that
  // is stopped keeps its senders waiting until their requests' deadlines; one that is stopped for
  // longer than a sender that closes lingers may lose that sender's last messages.
  int rnr_retry = 7;
  Connect connect = Connect::automatic;
  std::string ibverbs_library = "libibverbs.so.1";
  std::string rdmacm_library = "librdmacm.so.1";
};

// Throws Error with one sentence about a bad value.
Settings settings(const Options& options);

}  // namespace dicomm::verbs
