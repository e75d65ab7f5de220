#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace emuchip {
namespace {

// A plain array has no destructor, so it can still be read while the process exits.
thread_local char sentence[1024] = "";

}  // namespace

ditorch_status fail(ditorch_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error() { return sentence; }

}  // namespace emuchip
