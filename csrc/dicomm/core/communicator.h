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
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

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

enum class Transport { automatic, shm, tcp };  // automatic: shm within a host, else tcp

struct Options {
  int rank = 0;
  int world_size = 1;
  std::string secret;            // the job's; empty is refused when world_size > 1
  std::string name = "default";  // separates several communicators on one Store
  std::string rank_label;        // shown to peers in errors, e.g. "rank 3 (chip B)"; optional
  Transport transport = Transport::automatic;
  std::string listen_address;  // empty: the address this host's name resolves to, else loopback
  std::chrono::milliseconds timeout{300'000};  // default deadline of a wait
};

// One send or receive in flight. Destroying an unfinished Request cancels its claim on the
// buffer safely (it waits for the transport to let go of the memory, or aborts the message).
class Request {
 public:
  virtual ~Request() = default;
  virtual bool test() = 0;  // makes progress; true when finished; throws what wait() would throw
  // Returns the number of bytes received (or sent). Spins briefly, then sleeps.
  virtual std::size_t wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt) = 0;
  virtual int peer() const = 0;
  // Valid after completion: when the paced link delivered the message; 0 if not paced. The
  // real bytes are in place at completion even if this moment is still to come.
  virtual std::int64_t delivered_at_ns() const = 0;
};

class Communicator {
 public:
  static std::shared_ptr<Communicator> create(std::shared_ptr<Store> store, const Options& options);
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;  // the default deadline of a wait

  // The buffer must stay valid until the request finishes. Any length, 0 and over 2 GiB
  // included. ready_at_ns: when the data is ready on an emulated chip's clock (0: now).
  virtual std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer,
                                         std::uint64_t tag, std::int64_t ready_at_ns = 0) = 0;
  // capacity may exceed the message; a longer message is an Error naming both lengths, and the
  // stream stays usable. peer = any_source receives from whoever sends first with this tag.
  static constexpr int any_source = -1;
  virtual std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer,
                                         std::uint64_t tag) = 0;

  virtual void set_link(int peer, const LinkPace& pace) = 0;
  virtual LinkPace link(int peer) const = 0;

  // Counted payload bytes sent to a peer so far, for tests and reports.
  virtual std::uint64_t bytes_sent(int peer) const = 0;

  // Fails every pending and future request here with AbortedError, and at every connected peer
  // with PeerError carrying `reason`, so that all ranks can name the first cause.
  virtual void abort(const std::string& reason) = 0;
  // The same for a failure that another communicator of this process learnt of: everyone, here
  // too, gets PeerError with `cause` as it is, so that passing it on does not lengthen it.
  virtual void relay(const std::string& cause) = 0;
  // The first cause of the failure that ended this communicator; empty while there is none.
  virtual std::string failure() const = 0;
  // Leaves in order; pending requests fail. Idempotent; the destructor calls it.
  virtual void close() = 0;
};

}  // namespace dicomm
