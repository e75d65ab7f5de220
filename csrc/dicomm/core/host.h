// What this process must know about the machine it runs on.
#pragma once

#include <string>

namespace dicomm {

// Unlike for two processes where shared memory, local sockets and each other's process id do not
// work between them: another boot of a kernel, other namespaces, another user. Where it is equal
// they do, but for clones of a virtual machine: only a local call that is answered proves one host.
std::string host_id();
std::string host_name();
// Those that the ranks of this host may use together.
int usable_cores();
// Whether there is memory that the host may look at: a chip's it may not. Asks the kernel, which
// answers instead of crashing.
bool host_can_read(const void* address);

}  // namespace dicomm
