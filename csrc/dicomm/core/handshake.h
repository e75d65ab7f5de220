// How two ends of a new connection prove to each other that they know the job's secret.
//
//   dialler -> acceptor   hello       who I am and whom I want, a nonce
//   acceptor -> dialler   hello       the same, its own nonce
//   dialler -> acceptor   proof       its card, HMAC(secret, "dialler", both hellos, card)
//   acceptor -> dialler   verdict     code, its card, HMAC(secret, "acceptor", both hellos, code,
//                                     card); the transport's descriptor, if it has one, travels
//                                     along
//
// A card is what the transport has to tell the other side, else zeros.
//
// Every message has a fixed size and the exchange a deadline of its own, so a stranger can neither
// make us allocate nor wait; it learns a nonce and nothing else. An acceptor that has no room for a
// caller hangs up on it before the verdict, and the caller tries again.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "core/communicator.h"
#include "core/deadline.h"
#include "core/fd.h"
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
  std::int32_t pid;
  std::int32_t no_descriptors;  // 1: the acceptor has none left and hangs up
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
  failed,       // the card says what went wrong: try again
  unproven,     // you do not know the secret; so this one comes without a proof, too
};

using TransportCard = std::array<std::uint8_t, 528>;

struct ProofMessage {
  TransportCard card;
  Digest proof;
};

struct VerdictMessage {
  Verdict verdict;
  TransportCard card;
  Digest proof;
};

constexpr std::chrono::seconds kHandshakeTimeout{10};

struct Dialled {
  Verdict verdict;  // welcome or crossed
  PeerIdentity peer;
  TransportCard card;
  Digest session;  // a secret of this connection, known to both ends alone
  Fd descriptor;   // where one came along
};
// Throws Error saying what went wrong, TurnedAway where calling again may help.
Dialled dial_handshake(const Fd& socket, const Identity& me, int to_rank, const Deadline& deadline,
                       const TransportCard& card = {});

// Whom a transport accepts.
struct Caller {
  TransportCard card;
  Digest session;  // as in Dialled
};

// The acceptor's side, which never blocks.
class PendingConnection {
 public:
  PendingConnection(Fd socket, std::size_t door);

  enum class State { talking, proven, refused };
  // Reads what is there; `refused` and refusal() once it is no rank of ours.
  State advance(const Identity& me);
  // Tells a proven caller the verdict, with the descriptor if there is one. False: it is gone.
  bool answer(const Identity& me, Verdict verdict, const Fd& descriptor,
              const TransportCard& card = {});
  // The same where there is no connection for it now.
  void tell_failure(const Identity& me, const std::string& why);

  int fd() const { return socket_.get(); }
  Fd release() { return std::move(socket_); }
  std::size_t door() const { return door_; }
  bool greeted() const { return greeted_; }
  // When it came, or was greeted.
  std::chrono::steady_clock::time_point since() const { return since_; }
  const PeerIdentity& peer() const { return peer_; }
  const TransportCard& card() const { return proof_.card; }
  Caller caller() const { return {proof_.card, session_}; }
  // What to answer, as far as the caller's own words tell.
  Verdict verdict() const { return verdict_; }
  const std::string& refusal() const { return refusal_; }
  std::chrono::steady_clock::time_point deadline() const { return deadline_; }

 private:
  State refuse(std::string why);
  State refuse_unproven();

  Fd socket_;
  std::size_t door_;
  std::chrono::steady_clock::time_point since_;
  std::chrono::steady_clock::time_point deadline_;
  std::size_t got_ = 0;
  Hello theirs_{}, mine_{};
  ProofMessage proof_{};
  Digest session_{};
  bool greeted_ = false;
  PeerIdentity peer_;
  Verdict verdict_ = Verdict::welcome;
  std::string refusal_;
};

// To a caller who was accepted with the last descriptor.
void say_no_descriptors(const Fd& socket, const Identity& me);

}  // namespace dicomm
