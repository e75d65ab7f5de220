// dicomm's errors as torch.distributed's.
#pragma once

#include <exception>
#include <string>

#include "membership.h"

namespace dicomm {

// Turns a dicomm error into the c10 error that Python sees as DistBackendError, with the group,
// the operation and dicomm's text; if a peer failed, tells all other groups first.
std::exception_ptr translate(const std::exception& error, Membership& membership,
                             const std::string& operation);

}  // namespace dicomm
