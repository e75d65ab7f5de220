// What a transport is to the rest of dicomm. A folder of transport/ implements these interfaces,
// and a line of transport/registry.cpp makes it known; nothing else names it.
//
//   TransportFactory    what holds of it on every host: its name, how its contact words are read
//   Transport           one communicator's share of it: its listener, its devices
//   Dialler, Acceptor   the two sides of a connection in the making
//   Stream              the connection (stream.h)
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/deadline.h"
#include "core/fd.h"
#include "core/handshake.h"
#include "core/stream.h"

namespace dicomm {

class Dialler {
 public:
  virtual ~Dialler() = default;

  // What the handshake tells the acceptor.
  virtual TransportCard card() const { return {}; }
  // After the handshake, with what it brought. Waits for the peer where it must. Throws Error.
  virtual std::unique_ptr<Stream> connect(Fd socket, Dialled dialled, const Deadline& deadline) = 0;
};

class Acceptor {
 public:
  virtual ~Acceptor() = default;

  // What the handshake's verdict brings the dialler; a descriptor only over a local socket.
  virtual TransportCard card() const { return {}; }
  virtual const Fd& descriptor() const;
  // Where the dialler has more to say after the verdict, finish() waits for it. Throws Error.
  virtual bool finished() const { return true; }
  virtual void finish(const Fd& /*socket*/, const Deadline& /*deadline*/) {}
  // Never blocks; a dialler that waits for this side goes on from here. Throws Error.
  virtual std::unique_ptr<Stream> stream(Fd socket) = 0;
};

// The contact words are what a rank publishes of a transport: how it is reached by it.
class Transport {
 public:
  virtual ~Transport() = default;

  // The socket at which callers arrive. None: they come to another transport's listener, see
  // TransportFactory::door(). Throws Error.
  virtual Fd listen() { return {}; }
  // Its own words, once it listens.
  virtual std::string contact_words() const = 0;
  // Why it does not connect this rank with the one that published this: what follows "rank 3" in
  // an error. Empty: it does. Throws Error.
  virtual std::string obstacle(const std::string& host_id, const std::string& words) const = 0;

  // Calls a listener of its own kind. Throws Error; TurnedAway where this rank has no descriptors,
  // NotThisHost where it would have to be on this host.
  virtual Fd call(const std::string& words, const Deadline& deadline) const;
  virtual std::unique_ptr<Dialler> dial(const std::string& words) = 0;  // throws Error

  // Whether a caller who came to another transport's listener means this one.
  virtual bool wants(const TransportCard& /*card*/) const { return false; }
  virtual std::unique_ptr<Acceptor> accept(const Caller& caller) = 0;  // throws Error

  // See Communicator. From any thread, without the communicator's mutex.
  virtual void declare_memory(const MemoryRegion& /*region*/) {}
  virtual void forget_memory(std::uint64_t /*address*/, std::uint64_t /*bytes*/) {}
  virtual bool reaches_declared_memory() const { return true; }
};

class TransportFactory {
 public:
  virtual ~TransportFactory() = default;

  virtual const char* name() const = 0;
  // Of the transports that connect two ranks the one with the lowest is chosen.
  virtual int preference() const = 0;
  // Whether it connects any two ranks, so that one of them can insist on it alone.
  virtual bool connects_everyone() const { return false; }
  // Whose listener its callers come to: its own, or that of the transport with this name.
  virtual const char* door() const { return name(); }

  // How many contact words it has, and whether they can be its own. Throws Error.
  virtual int words() const { return 1; }
  virtual bool understands(const std::string& words) const = 0;
  // Where they say that it listens, as errors show it; empty: nowhere that would tell anyone.
  virtual std::string address(const std::string& /*words*/) const { return {}; }

  // What a communicator has of it, which may be nothing where nobody asked for it by name: then its
  // words say so. Throws Error.
  virtual std::unique_ptr<Transport> open(const Options& options) const = 0;
};

}  // namespace dicomm
