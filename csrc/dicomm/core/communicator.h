// libdicomm's public face: tagged messages between the ranks of one job.
//
// A Communicator connects the ranks of one job. Connections are made on first use, through a
// Store that every rank can reach; each proves it knows the job's secret before any payload is
// read. Messages between two ranks with the same tag arrive in order; matching is by
// (peer, tag). Every wait has a deadline. A peer that dies or aborts ends the communicator: the
// first rank to notice tells all it is connected with, and they theirs; then every request fails
// with an Error that names the first cause, the operation and the time waited. A peer that closes
// in order fails only what still involves it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/fd.h"

namespace dicomm {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class TimeoutError : public Error {
 public:
  using Error::Error;
};
class PeerError : public Error {  // the peer died, left, or aborted
 public:
  using Error::Error;
};
class AbortedError : public Error {  // this rank called abort()
 public:
  using Error::Error;
};

// Where ranks find each other. get() blocks until the key exists or throws TimeoutError.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

// The emulated link to a peer: a message departs when its data is ready and the link is free,
// and is delivered latency + bytes / bandwidth later. Times are CLOCK_MONOTONIC nanoseconds.
struct LinkPace {
  double latency_s = 0;
  double bytes_per_s = 0;  // 0: not paced
};

// With this each two ranks use the fastest transport that connects them.
constexpr const char* kAnyTransport = "auto";
// That, then every transport's name.
std::vector<std::string> transport_names();
// Throws Error unless it is one of those, else returns it.
const std::string& known_transport(const std::string& name);

// What only one transport, verbs, has to be told; here because callers set it. What is not set
// comes from the environment (DICOMM_GID_INDEX, ...), else is chosen.
struct VerbsOptions {
  std::optional<int> gid_index;      // of the port's table
  std::optional<int> mtu_bytes;      // 256 ... 4096
  std::optional<int> traffic_class;  // 0 ... 255
  std::optional<int> hop_limit;      // 1 ... 255
  std::optional<int> timeout;        // 0 ... 31: 4.096 us * 2^timeout
  std::optional<int> retry_count;    // 0 ... 7
  std::optional<int> rnr_retry;      // 0 ... 7
  std::string connect;               // auto, cm or bootstrap

  bool operator==(const VerbsOptions&) const = default;
};

// A piece of a chip's memory, as the chip's driver hands it to other devices.
struct Dmabuf {
  Fd fd;
  std::uint64_t offset_bytes = 0;  // where the piece begins in the buffer
};

// Memory that keeps its pages until forget_memory(): a segment of a chip's allocator, say.
struct MemoryRegion {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  // Of a chip whose driver exports its memory: exports a piece of the region; nothing where it
  // cannot. Called by any thread whenever an RDMA device registers the piece, which closes the
  // descriptor at once: a registration holds the memory without it. Throws nothing, and must not
  // wait for the chip's allocator, which may be what declares the memory.
  std::function<std::optional<Dmabuf>(std::uint64_t address, std::uint64_t bytes)> export_dmabuf =
      nullptr;
};

struct Options {
  int rank = 0;
  int world_size = 1;
  std::string secret;            // the job's; empty is refused when world_size > 1
  std::string name = "default";  // separates several communicators on one Store
  std::string rank_label;        // shown to peers in errors, e.g. "rank 3 (chip B)"; optional
  std::string transport = kAnyTransport;
  std::string chip;  // PCI address of this rank's, for the choice of its NICs; optional
  std::string nics;  // device[:port],... instead of that choice
  VerbsOptions verbs;
  std::string listen_address;  // empty: the address this host's name resolves to, else loopback
  std::string node;            // this rank's, for collectives over several; empty: the host
  std::chrono::milliseconds timeout{300'000};  // default deadline of a wait
};

// How a peer is reached.
struct RailDescription {
  std::string device;  // "mlx5_0:1"
  std::string gid, peer_gid;
  int mtu_bytes = 0;
  bool up = true;
  std::string connect;  // what connected it: cm or bootstrap
};
struct LinkDescription {
  std::string transport;               // "" while not connected
  std::vector<RailDescription> rails;  // where the transport has several ways at once
  std::string protection;              // "integrity by AES-128-GCM", say; "" where there is none
};

// One send or receive in flight. Destroying an unfinished Request cancels its claim on the
// buffer safely (it waits for the transport to let go of the memory, or aborts the message).
class Request {
 public:
  virtual ~Request() = default;
  virtual bool finished() const = 0;  // for free
  virtual bool test() = 0;  // makes progress; true when finished; throws what wait() would throw
  // Returns the number of bytes received (or sent). Spins briefly, then sleeps.
  virtual std::size_t wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;
  virtual int peer() const = 0;
  // Valid after completion: when the paced link delivered the message; 0 if not paced. The
  // real bytes are in place at completion even if this moment is still to come.
  virtual std::int64_t delivered_at_ns() const = 0;
};

class ChipBuffer;
class ChipWork;
class RequestState;

class Communicator {
 public:
  static std::shared_ptr<Communicator> create(std::shared_ptr<Store> store, const Options& options);
  // Called by some of this one's ranks: a communicator of those alone, with tags, deadlines and
  // failures of its own, over this one's connections, which live until both are closed. It adds
  // no thread, and no descriptor but those of peers that were not connected yet. Where
  // the options ask for other connections than this one's (a transport, say), it makes its own. All
  // must agree on that, which its first rank decides: the others wait for it. It makes its own,
  // too, where this one is closed or has lost one of the ranks. Options that are left empty about
  // this rank (chip, nics, verbs, listen_address) are as here. A connection that is lost ends all
  // communicators of the two ranks. ranks: of this one, in the new one's order. Throws Error.
  virtual std::shared_ptr<Communicator> subgroup(std::shared_ptr<Store> store,
                                                 const Options& options,
                                                 const std::vector<int>& ranks) = 0;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;  // the default deadline of a wait
  virtual const std::string& secret() const = 0;          // the job's, for its subgroups, too

  // The buffer must stay valid until the request finishes. Any length, 0 and over 2 GiB
  // included. ready_at_ns: when the data is ready on an emulated chip's clock (0: now). after: what
  // a chip has yet to do before the data is there (null: nothing); nobody waits for it but the
  // message, and those to the same peer with the same tag that follow.
  virtual std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer,
                                         std::uint64_t tag, std::int64_t ready_at_ns = 0,
                                         std::shared_ptr<ChipWork> after = nullptr) = 0;
  // capacity may exceed the message; a longer message is an Error naming both lengths, and the
  // stream stays usable. peer = any_source receives from whoever sends first with this tag. after:
  // what a chip has yet to do with the buffer; receives of the same tag that follow wait, too.
  static constexpr int any_source = -1;
  virtual std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer,
                                         std::uint64_t tag,
                                         std::shared_ptr<ChipWork> after = nullptr) = 0;
  // The same of bytes in a chip's memory. A receive may be finished before the chip has copied what
  // its peer's chip holds: see ChipBuffer::pull().
  virtual std::shared_ptr<Request> isend(std::shared_ptr<ChipBuffer> buffer, std::size_t bytes,
                                         int peer, std::uint64_t tag,
                                         std::shared_ptr<ChipWork> after = nullptr) = 0;
  virtual std::shared_ptr<Request> irecv(std::shared_ptr<ChipBuffer> buffer, std::size_t capacity,
                                         int peer, std::uint64_t tag) = 0;
  // isend() or irecv() and wait() in one, which is quicker. recv() returns the message's length.
  using Timeout = std::optional<std::chrono::milliseconds>;
  virtual void send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                    Timeout timeout = std::nullopt) = 0;
  virtual std::size_t recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                           Timeout timeout = std::nullopt) = 0;
  // isend() or irecv() of a request that its caller keeps, which is quicker, too. For the library's
  // own collectives: such a request must not outlive the communicator.
  virtual void start(RequestState& request, std::int64_t ready_at_ns) = 0;

  virtual void set_link(int peer, const LinkPace& pace) = 0;
  virtual LinkPace link(int peer) const = 0;

  // Counted payload bytes sent to a peer so far, for tests and reports.
  virtual std::uint64_t bytes_sent(int peer) const = 0;

  // What was chosen for a peer, once it is connected.
  virtual LinkDescription describe_link(int peer) const = 0;

  // RDMA registers declared memory once; other memory for each long message. Forget it before it
  // is freed or mapped anew. A subgroup has what is declared to the communicator that it shares
  // connections with, and declares nothing.
  virtual void declare_memory(const MemoryRegion& region) = 0;
  virtual void forget_memory(std::uint64_t address, std::uint64_t bytes) = 0;
  // False once there was declared memory that the RDMA devices registered and none could reach:
  // it is better copied to the host's before it is sent.
  virtual bool reaches_declared_memory() const = 0;

  // Fails every pending and future request here with AbortedError, and at every connected peer
  // with PeerError carrying `reason`, so that all ranks can name the first cause.
  virtual void abort(const std::string& reason) = 0;
  // The same for a failure that another communicator of this process learnt of: everyone, here
  // too, gets PeerError with `cause` as it is, so that passing it on does not lengthen it.
  virtual void relay(const std::string& cause) = 0;
  // The first cause of the failure that ended this communicator; empty while there is none.
  virtual std::string failure() const = 0;
  // A child that is forked from this process has no part in its connections, and closes them there
  // at once. In the child, whatever asks something of a communicator of before throws Error, as
  // this does; what only lets go of something does nothing.
  virtual void require_own_process() const = 0;
  // Leaves in order; pending requests fail. Idempotent; the destructor calls it.
  virtual void close() = 0;
};

}  // namespace dicomm
