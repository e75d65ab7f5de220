// The transports that this library has.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/transport.h"

namespace dicomm {

// In the order in which their words stand in a contact, and in which it numbers them, from 1.
std::span<const TransportFactory* const> registered_transports();

// The place in that table. Throws Error where there is none with this name; what: what named it.
std::size_t transport_index(const std::string& name, const char* what = "transport");

// The options' choice, else that of DICOMM_TRANSPORT. Throws Error.
std::string asked_transport(const Options& options);

}  // namespace dicomm
