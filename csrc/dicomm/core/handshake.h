// How two ends of a new connection prove to each other that they know the job's secret.
//
//   dialler -> acceptor   hello       who I am and whom I want, a nonce
//   acceptor -> dialler   hello       the same, its own nonce
//   dialler -> acceptor   proof       HMAC(secret, "dialler", both hellos)
//   acceptor -> dialler   verdict     code, HMAC(secret, "acceptor", both hellos, code);
//                                     with shared memory, the segment travels along
//
// Every message has a fixed size and the exchange a deadline of its own, so a stranger can neither
// make us allocate nor wait; it learns a nonce and nothing else.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "core/fd.h"
#include "core/patience.h"
#include "core/sha256.h"

namespace dicomm {

struct Identity {
  int rank = 0;
  int world_size = 1;
  std::string name;   // of the communicator
  std::string label;  // shown in errors
  std::string host;
  std::string secret;
};

// Who a proven peer says it is.
struct PeerIdentity {
  int rank = -1;
  int pid = 0;
  std::string label;
  std::string host;

  std::string describe() const;  // "rank 3 (chip B), pid 12 on host x"
};

struct Hello {
  char magic[8];
  std::uint32_t version;
  std::int32_t rank, to_rank, world_size;
  std::int32_t pid, reserved;
  Digest name;
  std::uint8_t nonce[32];
  char label[64];
  char host[64];
};
static_assert(sizeof(Hello) == 224);

enum class Verdict : std::uint32_t {
  welcome = 1,
  crossed,      // I am dialling you: wait for that
  wrong_rank,   // you want another rank, or are not who you can be
  wrong_world,  // another communicator or world size
  duplicate,    // your rank is connected already
};

struct VerdictMessage {
  Verdict verdict;
  Digest proof;
};

constexpr std::chrono::seconds kHandshakePatience{10};

struct Dialled {
  Verdict verdict;  // welcome or crossed
  PeerIdentity peer;
  Fd segment;  // where one came along
};
// Throws Error saying what went wrong.
Dialled dial_handshake(const Fd& socket, const Identity& me, int to_rank, const Patience& patience);

// The acceptor's side, which never blocks.
class Guest {
 public:
  Guest(Fd socket, bool local);

  enum class State { talking, proven, refused };
  // Reads what is there; `refused` and refusal() once it is no rank of ours.
  State advance(const Identity& me);
  // Tells a proven guest the verdict, with the segment if there is one. False: it is gone.
  bool answer(const Identity& me, Verdict verdict, const Fd& segment);

  int fd() const { return socket_.get(); }
  Fd release() { return std::move(socket_); }
  bool local() const { return local_; }
  const PeerIdentity& peer() const { return peer_; }
  // What to answer, as far as the guest's own words tell.
  Verdict verdict() const { return verdict_; }
  const std::string& refusal() const { return refusal_; }
  std::chrono::steady_clock::time_point deadline() const { return deadline_; }

 private:
  State refuse(std::string why);

  Fd socket_;
  bool local_;
  std::chrono::steady_clock::time_point deadline_;
  std::size_t got_ = 0;
  Hello theirs_{}, mine_{};
  Digest proof_{};
  bool greeted_ = false;
  PeerIdentity peer_;
  Verdict verdict_ = Verdict::welcome;
  std::string refusal_;
};

}  // namespace dicomm
