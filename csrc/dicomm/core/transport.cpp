#include "core/transport.h"

namespace dicomm {

const Fd& Acceptor::descriptor() const {
  static const Fd none;
  return none;
}

Fd Transport::call(const std::string&, const Deadline&) const {
  throw Error("this transport has no listener of its own");
}

}  // namespace dicomm
