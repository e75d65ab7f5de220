// The command line of dicomm-perf.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/communicator.h"

namespace dicomm::bench {

enum class Mode { latency, bandwidth, bidirectional };

struct Arguments {
  Mode mode = Mode::latency;
  Options communicator;
  std::string store;               // folder
  std::vector<std::size_t> sizes;  // bytes
  double seconds = 0.2;            // measured per size
  std::size_t iterations = 0;      // round trips, or windows; 0: as many as fit
  std::size_t window = 64;         // messages in flight
  std::size_t offset_bytes = 0;    // of the buffers from a page's start
};

// Throws Error with one sentence.
Arguments parse(int count, char** words);
std::string usage();
const char* name(Mode mode);

}  // namespace dicomm::bench
