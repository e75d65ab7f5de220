#include "transport/registry.h"

#include <algorithm>
#include <cstdlib>

#include "core/text.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"
#include "transport/verbs/transport.h"

namespace dicomm {

// A new transport comes last: ranks of versions without it then still read the others' words.
std::span<const TransportFactory* const> registered_transports() {
  static const TransportFactory* const table[] = {
      &shm_transport(),
      &tcp_transport(),
      &verbs_transport(),
  };
  return table;
}

std::size_t transport_index(const std::string& name, const char* what) {
  const auto table = registered_transports();
  const auto found = std::find_if(table.begin(), table.end(), [&](const TransportFactory* factory) {
    return factory->name() == name;
  });
  if (found != table.end()) return found - table.begin();
  std::string expected = kAnyTransport;
  for (const TransportFactory* factory : table)
    expected += text(factory == table.back() ? " or " : ", ", factory->name());
  throw Error(text(what, " '", name, "': expected ", expected));
}

std::vector<std::string> transport_names() {
  std::vector<std::string> names{kAnyTransport};
  for (const TransportFactory* factory : registered_transports()) names.push_back(factory->name());
  return names;
}

const std::string& known_transport(const std::string& name) {
  if (name != kAnyTransport) transport_index(name);
  return name;
}

std::string asked_transport(const Options& options) {
  const char* by_environment = std::getenv("DICOMM_TRANSPORT");
  if (options.transport != kAnyTransport || !by_environment || !*by_environment)
    return known_transport(options.transport);
  const std::string name = by_environment;
  if (name != kAnyTransport) transport_index(name, "DICOMM_TRANSPORT");
  return name;
}

}  // namespace dicomm
