#include "errors.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace dicomm {

std::exception_ptr translate(const std::exception& error, Membership& membership,
                             const std::string& operation) {
  std::string text = error.what();
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error))
    text = torch_error->what_without_backtrace();
  if (dynamic_cast<const TimeoutError*>(&error)) {
    membership.set_error(c10d::ErrorType::TIMEOUT);
    text = "Timed out in " + text;
  } else if (dynamic_cast<const PeerError*>(&error)) {
    membership.set_error(c10d::ErrorType::REMOTE_ERROR);
    const std::string cause = membership.communicator().failure();
    cause.empty() ? Membership::abort_all(text) : Membership::relay_to_all(cause);
  } else {
    membership.set_error(c10d::ErrorType::COMM_ERROR);
  }
  try {
    C10_THROW_ERROR(DistBackendError,
                    operation + " (process group '" + membership.name() + "'): " + text);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace dicomm
