// Shared memory between two processes of one host.
//
// The memory has no name: it is a memfd that travels over a local socket, so nothing can be left
// behind. The socket stays open: it wakes a sleeping peer, and its end is how a death shows.
#pragma once

#include <memory>
#include <string>

#include "core/deadline.h"
#include "core/fd.h"
#include "core/stream.h"

namespace dicomm {

struct LocalListener {
  Fd fd;
  std::string name;
};

// Its name has the rank in it: clones of a machine may draw the same random number. Throws Error.
LocalListener local_listen(int rank);
// Throws Error; TurnedAway where this rank has no descriptors, NotThisHost where nobody listens.
Fd local_connect(const std::string& name, const Deadline& deadline);
Fd make_segment();  // throws Error
// The side that made the segment is its owner; the two sides must differ. Throws Error.
std::unique_ptr<Stream> shm_stream(Fd socket, Fd segment, bool owner);

class TransportFactory;
const TransportFactory& shm_transport();

}  // namespace dicomm
