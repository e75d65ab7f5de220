#include "core/handshake.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "core/text.h"

namespace dicomm {

namespace {

constexpr char kMagic[8] = {'d', 'i', 'c', 'o', 'm', 'm', 'h', 's'};
constexpr std::uint32_t kVersion = 6;

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

Hello make_hello(const Identity& me, int to_rank) {
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.version = kVersion;
  hello.rank = me.rank;
  hello.to_rank = to_rank;
  hello.world_size = me.world_size;
  hello.pid = ::getpid();
  hello.name = sha256(me.name);
  shortened(me.label, sizeof hello.label - 1).copy(hello.label, sizeof hello.label);
  shortened(me.host, sizeof hello.host - 1).copy(hello.host, sizeof hello.host);
  if (::getrandom(hello.nonce, sizeof hello.nonce, 0) != sizeof hello.nonce)
    throw Error(text("no random numbers: ", system_error(errno)));
  return hello;
}

PeerIdentity identity(const Hello& hello) {
  const auto word = [](const char (&field)[64]) {
    return as_utf8({field, ::strnlen(field, sizeof field)});
  };
  return {hello.rank, hello.pid, word(hello.label), word(hello.host)};
}

Digest proof(const Identity& me, std::string_view role, const Hello& dialler, const Hello& acceptor,
             std::string_view extra = {}) {
  std::string message(role);
  message.append(bytes_of(dialler)).append(bytes_of(acceptor)).append(extra);
  return hmac_sha256(me.secret, message);
}

// Nobody sees it on the way, and both nonces make it another one for every connection.
Digest session(const Identity& me, const Hello& dialler, const Hello& acceptor) {
  return proof(me, "session", dialler, acceptor);
}

std::string verdict_words(const VerdictMessage& message) {
  return std::string(bytes_of(message.verdict)).append(bytes_of(message.card));
}

constexpr const char* kHungUp =
    "it hung up during the handshake: it is leaving, or has more callers than it can take, or "
    "another program listens there";

// Blocking halves, for the dialler.
void wait_for(const Fd& socket, short events, const Deadline& deadline) {
  if (!deadline.wait(socket.get(), events)) throw Error("the handshake was not answered in time");
}

// Where it has hung up, what it said before is still there to be read.
void send_all(const Fd& socket, std::string_view data, const Deadline& deadline) {
  while (!data.empty()) {
    const ssize_t sent =
        ::send(socket.get(), data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      data.remove_prefix(sent);
    } else if (errno == EAGAIN || errno == EINTR) {
      wait_for(socket, POLLOUT, deadline);
    } else {
      return;
    }
  }
}

Fd descriptor_in(msghdr& message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part))
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part), sizeof fd);
      return Fd(fd);
    }
  return {};
}

template <class T>
Fd receive_all(const Fd& socket, T& value, const Deadline& deadline) {
  Fd descriptor;
  std::size_t got = 0;
  while (got < sizeof value) {
    iovec part{reinterpret_cast<char*>(&value) + got, sizeof value - got};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_LEN(sizeof(int));  // one descriptor: more would leak
    const ssize_t received = ::recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received > 0) {
      if (Fd fd = descriptor_in(message)) descriptor = std::move(fd);
      got += received;
    } else if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
      wait_for(socket, POLLIN, deadline);
    } else {
      throw TurnedAway(kHungUp);
    }
    if (message.msg_flags & MSG_CTRUNC) throw TurnedAway(kNoDescriptors);
  }
  return descriptor;
}

std::string words_on(const TransportCard& card) {
  const char* words = reinterpret_cast<const char*>(card.data());
  return as_utf8({words, ::strnlen(words, card.size())});
}

std::string meaning(Verdict verdict) {
  switch (verdict) {
    case Verdict::wrong_rank:
      return "another rank of this job listens there";
    case Verdict::wrong_world:
      return "it belongs to another communicator, or one of another world size";
    case Verdict::duplicate:
      return "it already has a connection with this rank: two processes with the same rank?";
    case Verdict::unproven:
      return "the secrets differ: it says that this rank does not know its job's";
    default:
      return "it gave an unknown verdict";
  }
}

}  // namespace

std::string PeerIdentity::describe() const {
  std::string who = label.empty() ? text("rank ", rank) : label;
  if (pid != 0) who += text(", pid ", pid, " on host ", host);
  return who;
}

Dialled dial_handshake(const Fd& socket, const Identity& me, int to_rank, const Deadline& deadline,
                       const TransportCard& card) {
  const Hello mine = make_hello(me, to_rank);
  send_all(socket, bytes_of(mine), deadline);
  Hello theirs{};
  receive_all(socket, theirs, deadline);
  if (std::memcmp(theirs.magic, kMagic, sizeof kMagic) != 0)
    throw Error("what listens there does not speak dicomm");
  if (theirs.version != kVersion)
    throw Error(
        text("it speaks version ", theirs.version, " of the handshake, this rank ", kVersion));
  if (theirs.no_descriptors != 0)
    throw TurnedAway(
        text(identity(theirs).describe(), " has no file descriptors left (ulimit -n)"));
  const ProofMessage proven{card, proof(me, "dialler", mine, theirs, bytes_of(card))};
  send_all(socket, bytes_of(proven), deadline);
  VerdictMessage message{};
  Fd descriptor = receive_all(socket, message, deadline);
  if (message.verdict == Verdict::unproven) throw Error(meaning(message.verdict));
  if (!equal(message.proof, proof(me, "acceptor", mine, theirs, verdict_words(message))))
    throw Error("it does not know this job's secret");
  if (message.verdict == Verdict::failed)
    throw TurnedAway(text("it could not make the connection: ", words_on(message.card)));
  if (message.verdict != Verdict::welcome && message.verdict != Verdict::crossed)
    throw Error(meaning(message.verdict));
  if (theirs.rank != to_rank) throw Error(meaning(Verdict::wrong_rank));
  return {message.verdict, identity(theirs), message.card, session(me, mine, theirs),
          std::move(descriptor)};
}

PendingConnection::PendingConnection(Fd socket, std::size_t door)
    : socket_(std::move(socket)),
      door_(door),
      since_(std::chrono::steady_clock::now()),
      deadline_(since_ + kHandshakeTimeout) {}

PendingConnection::State PendingConnection::refuse(std::string why) {
  refusal_ = std::move(why);
  return State::refused;
}

PendingConnection::State PendingConnection::refuse_unproven() {
  const VerdictMessage reply{Verdict::unproven, {}, {}};
  (void)!::send(socket_.get(), &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
  return refuse("does not know this job's secret");
}

PendingConnection::State PendingConnection::advance(const Identity& me) {
  while (true) {
    char* target = greeted_ ? reinterpret_cast<char*>(&proof_) : reinterpret_cast<char*>(&theirs_);
    const std::size_t wanted = greeted_ ? sizeof proof_ : sizeof theirs_;
    const ssize_t got = ::recv(socket_.get(), target + got_, wanted - got_, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return State::talking;
    if (got <= 0) return refuse("hung up during the handshake");
    got_ += got;
    if (!greeted_ && std::memcmp(theirs_.magic, kMagic, std::min(got_, sizeof kMagic)) != 0)
      return refuse("did not speak dicomm");
    if (got_ < wanted) continue;
    got_ = 0;
    if (greeted_) break;
    mine_ = make_hello(me, theirs_.rank);
    greeted_ = true;
    since_ = std::chrono::steady_clock::now();
    // An empty socket buffer takes a hello at once; a caller that makes it not do so is no rank.
    if (::send(socket_.get(), &mine_, sizeof mine_, MSG_DONTWAIT | MSG_NOSIGNAL) != sizeof mine_)
      return refuse("did not take the answer to its hello");
    if (theirs_.version != kVersion) return refuse("spoke another version of the handshake");
  }
  if (!equal(proof_.proof, proof(me, "dialler", theirs_, mine_, bytes_of(proof_.card))))
    return refuse_unproven();
  session_ = session(me, theirs_, mine_);
  peer_ = identity(theirs_);
  if (theirs_.name != mine_.name || theirs_.world_size != me.world_size)
    verdict_ = Verdict::wrong_world;
  else if (theirs_.to_rank != me.rank || theirs_.rank < 0 || theirs_.rank >= me.world_size ||
           theirs_.rank == me.rank)
    verdict_ = Verdict::wrong_rank;
  return State::proven;
}

bool PendingConnection::answer(const Identity& me, Verdict verdict, const Fd& descriptor,
                               const TransportCard& card) {
  VerdictMessage reply{verdict, card, {}};
  reply.proof = proof(me, "acceptor", theirs_, mine_, verdict_words(reply));
  iovec part{&reply, sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = descriptor.get();
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  return ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof reply;
}

void PendingConnection::tell_failure(const Identity& me, const std::string& why) {
  TransportCard card{};
  shortened(why, card.size() - 1).copy(reinterpret_cast<char*>(card.data()), card.size());
  answer(me, Verdict::failed, Fd(), card);
}

void say_no_descriptors(const Fd& socket, const Identity& me) {
  Hello hello{};
  // What is unread when the socket is closed would destroy what is said.
  (void)!::recv(socket.get(), &hello, sizeof hello, MSG_DONTWAIT);
  hello = make_hello(me, 0);
  hello.no_descriptors = 1;
  (void)!::send(socket.get(), &hello, sizeof hello, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace dicomm
