// Failures inside the library are exceptions; at the C boundary they become a status and a
// sentence.
#pragma once

#include <string>
#include <utility>

#include "runtime.h"

namespace opencl {

struct Failure {
  ditorch_status status;
  std::string sentence;
};

[[noreturn]] inline void fail(ditorch_status status, std::string sentence) {
  throw Failure{status, std::move(sentence)};
}

// Keeps the sentence for last_error and hands the failure's status back.
ditorch_status keep(const Failure& failure);
const char* last_error();

// Runs an entry of a table: a Failure becomes its status.
template <class Body>
ditorch_status guarded(Body body) {
  try {
    return body();
  } catch (const Failure& failure) {
    return keep(failure);
  } catch (const std::exception& error) {
    return keep({DITORCH_ERROR, error.what()});
  }
}

}  // namespace opencl
