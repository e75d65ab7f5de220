// Rails that fail, and what the socket carries when none is left or wanted.
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/text.h"
#include "transport/verbs/stream.h"

namespace dicomm::verbs {

namespace {

// Where all rails fail at once the peer is dead, has withdrawn, or both networks are down: the
// socket tells which, if it can, within this time.
constexpr int kLastWordsMs = 1000;
constexpr std::size_t kMaxSocketMessage = kSlotBytes;
// All that a well-behaved peer can have on its way, twice; one that never stops keeps nobody
// waiting.
constexpr int kReadsPerTurn = 2 * kSlots;

}  // namespace

void VerbsStream::fail(int rail, const std::string& reason) {
  Link& link = *links_[rail];
  link.close();
  failures_ += text(failures_.empty() ? "" : "; ", "rail ", link.describe(), ": ", reason);
  if (rail_ == rail) rail_ = kNone;
  last_sent_ = false;
  char word;
  const ssize_t got = ::recv(socket_.get(), &word, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got == 0) socket_ended(0);
  if (got < 0 && errno != EAGAIN && errno != EINTR) socket_ended(errno);
  std::size_t left = 0;
  for (const auto& other : links_) left += other && other->up();
  if (left == 0) return all_failed();
  await_reads(rail);
  reissue_reads(rail);
  if (!peer_gone_)
    std::fprintf(stderr, "dicomm: rail %s failed (%s); going on over the other %zu\n",
                 link.describe().c_str(), reason.c_str(), left);
  announce_ = true;
  if (rail_ != kNone) return;
  choose_rail();
  if (rail_ != kNone) send_again();
}

// What the peer may not have read yet; it drops what it has.
void VerbsStream::send_again() {
  const std::uint32_t first = consumed_by_peer_ + 1;
  const std::uint32_t count = next_ - first;
  if (count == 0) return;
  if (!on_socket_) {
    links_[rail_]->sent += count;
    links_[rail_]->sends_posted += count;
  }
  post_slots(first, count);
}

// Nothing of the peer's reads or writes memory here from now on, nor do reads of ours.
void VerbsStream::close_rails() {
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (!links_[i]) continue;
    links_[i]->close();
    await_reads(static_cast<int>(i));
    links_[i]->reads = 0;
  }
  rail_ = kNone;
}

void VerbsStream::give_up_rails() {
  if (on_socket_) return;
  on_socket_ = true;
  close_rails();
  reads_.clear();
  readings_.clear();
  send_again();
}

// The peer may still read exposed buffers, and reads of ours may still write: closing the queue
// pairs is what ends that for sure. Whatever is still to be said goes over the socket.
void VerbsStream::withdraw() {
  if (exposed_.empty() && reads_.empty()) return;
  try {
    give_up_rails();
    flush_socket();
  } catch (const StreamEnd& end) {
    end_ = end;
  }
}

void VerbsStream::all_failed() {
  if (socket_speaks_) return;
  pollfd waiting{socket_.get(), POLLIN, 0};
  if (::poll(&waiting, 1, kLastWordsMs) > 0) read_socket();
  if (on_socket_ || end_ || peer_gone_) return;
  const std::string reason = text("every RDMA rail to it failed: ", failures_);
  send_on_socket(SocketMessage::failed, reason.data(), reason.size());
  flush_socket();
  throw StreamEnd{reason, false};
}

void VerbsStream::send_on_socket(SocketMessage::Kind kind, const void* data, std::size_t bytes) {
  const SocketMessage message{kind, static_cast<std::uint32_t>(bytes)};
  socket_out_.append(reinterpret_cast<const char*>(&message), sizeof message);
  socket_out_.append(static_cast<const char*>(data), bytes);
}

void VerbsStream::flush_socket() {
  while (!socket_out_.empty()) {
    const ssize_t sent =
        ::send(socket_.get(), socket_out_.data(), socket_out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (sent <= 0) {
      socket_out_.clear();
      socket_ended(sent < 0 ? errno : 0);
      return;
    }
    socket_out_.erase(0, static_cast<std::size_t>(sent));
  }
}

void VerbsStream::read_socket() {
  char buffer[kSlotBytes];
  ssize_t got = 0;
  try {
    for (int turns = 0; turns < kReadsPerTurn; ++turns) {
      got = ::recv(socket_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (got <= 0) break;
      socket_in_.append(buffer, static_cast<std::size_t>(got));
      socket_messages();
    }
  } catch (const StreamEnd& end) {
    end_ = end;
  }
  // What came over the rails before counts, too.
  if (got == 0) socket_ended(0);
  if (got < 0 && errno != EAGAIN && errno != EINTR) socket_ended(errno);
}

// A network that is gone is not a process that died, though its rails may work still.
void VerbsStream::socket_ended(int error) {
  if (peer_gone_) return;
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH)
    peer_gone_ = StreamEnd{
        "it gives no answer over TCP any more: its machine is gone, or the network over which "
        "both have met",
        false};
  else
    peer_gone_ = StreamEnd{"its connection closed"};
}

void VerbsStream::socket_messages() {
  std::size_t at = 0;
  while (socket_in_.size() - at >= sizeof(SocketMessage)) {
    SocketMessage message;
    std::memcpy(&message, socket_in_.data() + at, sizeof message);
    if (message.bytes > kMaxSocketMessage) throw StreamEnd{"it sent a malformed word"};
    if (socket_in_.size() - at < sizeof message + message.bytes) break;
    socket_message(message,
                   reinterpret_cast<const std::byte*>(socket_in_.data() + at + sizeof message));
    at += sizeof message + message.bytes;
  }
  socket_in_.erase(0, at);
}

void VerbsStream::socket_message(const SocketMessage& message, const std::byte* data) {
  if (message.kind == SocketMessage::failed)
    throw StreamEnd{as_utf8({reinterpret_cast<const char*>(data), message.bytes}), false};
  if (message.kind != SocketMessage::slot) throw StreamEnd{"it sent an unknown word"};
  // It has closed its queue pairs; ours lead nowhere. What they brought comes first.
  if (!on_socket_) {
    socket_speaks_ = true;
    for (std::size_t i = 0; i < links_.size(); ++i)
      if (links_[i] && links_[i]->up()) poll_rail(static_cast<int>(i));
    give_up_rails();
  }
  auto slot = std::make_unique<std::byte[]>(message.bytes);
  std::memcpy(slot.get(), data, message.bytes);
  const std::byte* start = slot.get();
  arrive(kNone, {}, start, message.bytes, std::move(slot));
}

}  // namespace dicomm::verbs
