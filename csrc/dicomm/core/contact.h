// How to reach a rank: what each publishes in the Store.
#pragma once

#include <string>
#include <vector>

#include "core/communicator.h"
#include "transport/verbs/gids.h"

namespace dicomm {

struct Contact {
  Transport transport = Transport::automatic;
  std::string host_id;
  std::string local_name;   // of the listening local (abstract unix) socket
  std::string tcp_address;  // numeric
  int tcp_port = 0;
  std::vector<verbs::PublishedRail> rails;  // empty: no RDMA

  std::string where() const;  // "10.0.0.3:4242", shown in errors
  std::string encode() const;
  // Throws Error: the Store may hold anything.
  static Contact decode(const std::string& value, int rank);
};

std::string contact_key(const std::string& communicator_name, int rank);

// shm, verbs or tcp; throws Error where what a side asks for cannot be had.
Transport choose_transport(const Contact& mine, const Contact& theirs, int their_rank);

}  // namespace dicomm
