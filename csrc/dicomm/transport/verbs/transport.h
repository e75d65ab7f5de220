// RDMA as a transport. Its callers come to TCP's listener, and over that socket the two sides
// exchange what their queue pairs need.
#pragma once

#include "core/transport.h"

namespace dicomm {

const TransportFactory& verbs_transport();

}  // namespace dicomm
