// What this process must know about the machine it runs on.
#pragma once

#include <string>

namespace dicomm {

// Equal for two processes exactly where shared memory, local sockets and each other's process id
// work between them: same boot of one kernel, same namespaces, same user.
std::string host_id();
std::string host_name();
// Those that the ranks of this host may use together.
int usable_cores();

}  // namespace dicomm
