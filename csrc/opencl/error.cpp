#include "error.h"

#include <cstdio>

namespace opencl {
namespace {

// A plain array has no destructor, so it can still be read while the process exits.
thread_local char kept[1024] = "";

}  // namespace

ditorch_status keep(const Failure& failure) {
  std::snprintf(kept, sizeof kept, "%s", failure.sentence.c_str());
  return failure.status;
}

const char* last_error() { return kept; }

}  // namespace opencl
