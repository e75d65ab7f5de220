// How to reach a rank: what each publishes in the Store.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/transport.h"

namespace dicomm {

struct Contact {
  std::size_t asked = 0;  // the number of the transport that it asks for; 0: any
  std::string host_id;
  std::vector<std::string> words;  // a transport's each, in the registry's order

  std::string where() const;  // "10.0.0.3:4242", shown in errors
  std::string encode() const;
  // Throws Error: the Store may hold anything.
  static Contact decode(const std::string& value, int rank);
};

std::string contact_key(const std::string& communicator_name, int rank);

// The transport of `mine`, which are in the registry's order, that connects this rank with theirs;
// throws Error where what a side asks for cannot be had.
std::size_t choose_transport(const std::vector<std::unique_ptr<Transport>>& mine, std::size_t asked,
                             const Contact& theirs, int their_rank);

}  // namespace dicomm
