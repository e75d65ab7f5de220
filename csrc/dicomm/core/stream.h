// An ordered stream of bytes to one peer that never blocks: what a transport provides.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace dicomm {

// The stream is over: the peer closed it, or it broke.
struct StreamEnd {
  std::string reason;
};

class Stream {
 public:
  virtual ~Stream() = default;

  // Both move what they can now, possibly 0 bytes, and throw StreamEnd.
  virtual std::size_t write(const iovec* parts, int count) = 0;
  virtual std::size_t read(void* data, std::size_t bytes) = 0;

  // Messages up to this length are sent at once, longer ones when the receiver is ready.
  virtual std::size_t eager_bytes() const = 0;

  // Copies from the peer's memory, where the transport can. False: the peer has withdrawn it, and
  // what was copied may be anything. Throws StreamEnd when the peer died.
  virtual bool can_pull() const { return false; }
  virtual bool pull(void* /*data*/, std::uint64_t /*address*/, std::size_t /*bytes*/) {
    return false;
  }
  // From here on the peer must not trust what it pulls from this side.
  virtual void withdraw() {}

  // What to watch while asleep. on_event() runs when it is readable; throws nothing.
  virtual int fd() const = 0;
  virtual void on_event() {}
  // The descriptor turns writable when write() can go on; otherwise on_event() tells.
  virtual bool watch_writable() const { return false; }
  // Whether read() may have something, for free.
  virtual bool cheap_to_poll() const { return false; }

  // Asks the peer to wake this side; false: there is something to do already.
  virtual bool prepare_sleep(bool /*want_to_write*/) { return true; }
  virtual void woke() {}

  // Tells the peer that nothing more is written.
  virtual void finish_writing() = 0;
};

}  // namespace dicomm
