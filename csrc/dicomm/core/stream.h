// An ordered stream of bytes to one peer that never blocks: what a transport provides.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/communicator.h"

namespace dicomm {

// The stream is over: the peer closed it, or it broke.
struct StreamEnd {
  std::string reason;
  bool peer_died = true;  // else only the way to it did
};

// What a peer needs, besides its address, to read memory of this side: RDMA's key for each rail.
using MemoryKeys = std::array<std::uint32_t, 8>;

// A long message on its way from the peer's memory into ours.
struct Pull {
  std::uint32_t id;  // the offer's
  std::byte* data;
  std::uint64_t address;  // the peer's
  std::uint64_t bytes;
  MemoryKeys keys;
  std::uint64_t moved = 0;  // in place, from the front

  bool done() const { return moved == bytes; }
};

enum class Pulled {
  moved,
  waiting,    // for what others move, or for the peer to say that it took the message back
  withdrawn,  // the peer withdrew the memory, and what was copied may be anything
  refused,    // the memory cannot be read: the peer has to stream the message
};

class Stream {
 public:
  virtual ~Stream() = default;

  // Both move what they can now, possibly 0 bytes, and throw StreamEnd.
  virtual std::size_t write(const iovec* parts, int count) = 0;
  virtual std::size_t read(void* data, std::size_t bytes) = 0;

  // Writes a frame that is short for this transport, all of it or nothing, and throws nothing.
  // False: write() has to be asked.
  virtual bool write_at_once(const void* /*header*/, std::size_t /*header_bytes*/,
                             const void* /*payload*/, std::size_t /*payload_bytes*/) {
    return false;
  }

  // Messages up to this length are sent at once, longer ones when the receiver is ready.
  virtual std::size_t eager_bytes() const = 0;
  // From here on this host has more ranks than cores: the peer may well run on this side's.
  virtual void become_crowded() {}

  // Long messages are read from the sender's memory, where the transport can.
  virtual bool can_pull(const Pull& /*pull*/) { return false; }
  // How many pulls it can have going at once.
  virtual std::size_t concurrent_pulls() const { return 1; }
  // The sender's side: the peer may read the offer's buffer from here on, until conceal().
  virtual MemoryKeys expose(std::uint64_t /*id*/, const void* /*data*/, std::size_t /*bytes*/) {
    return {};
  }
  virtual void conceal(std::uint64_t /*id*/) {}
  // The sender's side: takes an exposed offer back before the peer answered it, whereupon conceal()
  // comes as always. True: what the peer reads of it from here on does not count, so that the
  // buffer is free; false: the peer has to let go of it.
  virtual bool take_back(std::uint64_t /*id*/) { return true; }
  // The receiver's side: goes on with a pull, without blocking: copies a piece, or starts reads
  // and counts those that ended. The sender may be asked to copy, too. Throws StreamEnd when the
  // peer died.
  virtual Pulled pull(Pull& /*pull*/, bool /*with_sender*/) { return Pulled::refused; }
  // The sender's side: copies a piece of what the peer pulls, where it was asked to. Whether it
  // did.
  virtual bool push() { return false; }
  // Whether unfinished pulls end by themselves, and on_event() tells.
  virtual bool pulls_in_background() const { return false; }
  // Gives up on an unfinished pull: true once nothing writes to its data any more.
  virtual bool abandon(Pull& /*pull*/) { return true; }
  // From here on the peer must not trust what it pulls from this side.
  virtual void withdraw() {}

  // What to watch while asleep. on_event() runs when it is readable; throws nothing.
  virtual int fd() const = 0;
  virtual void on_event() {}
  // The descriptor turns writable when write() can go on; otherwise on_event() tells.
  virtual bool watch_writable() const { return false; }
  // Whether read() may have something, for free.
  virtual bool cheap_to_poll() const { return false; }
  // Whether read() would surely move nothing, nor throw.
  virtual bool has_nothing() const { return false; }

  // Asks the peer to wake this side; false: there is something to do already.
  virtual bool prepare_sleep(bool /*want_to_write*/) { return true; }
  virtual void woke() {}

  // Whether what was written reaches the peer even if this process ends at once.
  virtual bool outlives_writer() const { return false; }
  // Whether both ends have been shown to be processes of one host.
  virtual bool is_within_host() const { return false; }
  virtual LinkDescription describe() const = 0;
  // A thread of this side spins on that core, and tells the peer where that is for free. Whether
  // the peer's own was there last: then spinning only keeps it from answering.
  virtual bool peer_shares_core(int /*core*/) { return false; }

  // Looked at every few seconds: throws StreamEnd where the peer's machine has vanished in silence
  // and nothing else would tell.
  virtual void check_alive() {}

  // Tells the peer that nothing more is written.
  virtual void finish_writing() = 0;
};

}  // namespace dicomm
