// The writing half of a Connection, and how it lets go of buffers.
#include <algorithm>
#include <cstring>

#include "core/connection.h"
#include "core/text.h"

namespace dicomm {

Connection::Connection(PeerIdentity peer, std::unique_ptr<Stream> stream, Ledger& ledger,
                       Matcher& matcher)
    : peer_(std::move(peer)), stream_(std::move(stream)), ledger_(ledger), matcher_(matcher) {}

void Connection::own_payload(Outgoing& frame, const void* payload, std::size_t bytes) {
  auto copy = std::make_unique<std::byte[]>(bytes);
  std::memcpy(copy.get(), payload, bytes);
  frame.owned = std::move(copy);
  frame.payload = frame.owned.get();
  frame.payload_bytes = bytes;
}

void Connection::queue(FrameHeader header, const std::string& payload) {
  if (said_goodbye_) return;
  Outgoing& frame = new_frame();
  frame.header = header;
  if (!payload.empty()) {
    frame.header.bytes = payload.size();
    own_payload(frame, payload.data(), payload.size());
  }
  enqueue(frame);
}

// Filled where it stays: moving one costs a noticeable part of a short message's time.
Connection::Outgoing& Connection::new_frame() {
  if (has_output()) return frames_.emplace_back();
  return current_ = Outgoing();
}

void Connection::enqueue(Outgoing& frame) {
  if (&frame == &current_) start_writing();
}

bool Connection::send_at_once(const RequestState& request) {
  const std::size_t cost = request.bytes + kMessageOverheadBytes;
  if (has_output() || eager_outstanding_ + cost > kCreditBytes) return false;
  FrameHeader header;
  header.kind = FrameKind::eager;
  header.credit = consumed_;
  header.tag = request.tag;
  header.bytes = request.bytes;
  header.context = request.context;
  if (!stream_->write_at_once(&header, FrameHeader::kShortBytes, request.data, request.bytes))
    return false;
  consumed_ = 0;
  eager_outstanding_ += cost;
  return true;
}

void Connection::send_message(RequestState& request) {
  const std::size_t cost = request.bytes + kMessageOverheadBytes;
  const bool eager = !request.chip && request.bytes <= stream_->eager_bytes() &&
                     eager_outstanding_ + cost <= kCreditBytes;
  if (!eager && offers_.size() == kMaxOffers)
    return ledger_.fail(request, Outcome::error,
                        text("send to ", peer_.describe(), ", tag ", request.tag, ": ", kMaxOffers,
                             " messages wait there for a receive already; let it receive some "
                             "before more are sent"));
  Outgoing& frame = new_frame();
  frame.header.tag = request.tag;
  frame.header.bytes = request.bytes;
  frame.header.context = request.context;
  request.id = eager ? 0 : free_id();
  frame.header.delivered_at_ns = request.delivered_at;
  frame.header.is_long = request.delivered_at != 0;
  if (eager) {
    eager_outstanding_ += cost;
    frame.header.kind = FrameKind::eager;
    frame.payload = request.data;
    frame.payload_bytes = request.bytes;
    frame.request = &request;
  } else if (request.chip) {
    frame.header.kind = FrameKind::offer_chip;
    frame.header.id = request.id;
    own_payload(frame, &request.chip->handle(), sizeof(MemoryHandle));
    offers_.emplace(request.id, &request);
  } else {
    frame.header.kind = FrameKind::offer;
    frame.header.id = request.id;
    frame.header.is_long = 1;
    frame.header.address = reinterpret_cast<std::uint64_t>(request.data);
    const MemoryKeys keys = stream_->expose(request.id, request.data, request.bytes);
    own_payload(frame, &keys, sizeof keys);
    offers_.emplace(request.id, &request);
  }
  enqueue(frame);
}

// Of billions of messages no two under way have the same.
std::uint32_t Connection::free_id() {
  do ++last_id_;
  while (last_id_ == 0 || offers_.contains(last_id_));
  return last_id_;
}

void Connection::send_join(std::uint32_t context) {
  queue({.kind = FrameKind::join, .context = context});
}

void Connection::send_abort(std::uint32_t context, const std::string& reason) {
  queue({.kind = FrameKind::abort, .context = context},
        std::string(shortened(reason, kMaxReasonBytes)));
}

void Connection::send_leave(std::uint32_t context) {
  queue({.kind = FrameKind::leave, .context = context});
}

void Connection::send_goodbye() {
  queue({.kind = FrameKind::goodbye});
  said_goodbye_ = true;
}

bool Connection::next_frame() {
  if (!frames_.empty()) {
    current_ = std::move(frames_.front());
    frames_.pop_front();
    start_writing();
    return true;
  }
  if (streaming_.empty()) return false;
  RequestState& request = *streaming_.front();
  current_ = Outgoing();
  current_.payload = request.data + request.moved;
  current_.payload_bytes = std::min(kChunkBytes, request.bytes - request.moved);
  current_.request = &request;
  current_.header.kind = FrameKind::data;
  current_.header.id = request.id;
  current_.header.bytes = current_.payload_bytes;
  start_writing();
  return true;
}

void Connection::start_writing() {
  current_.header.credit = consumed_;
  consumed_ = 0;
  credit_queued_ = false;
  written_ = 0;
  writing_ = true;
}

bool Connection::flush() {
  while (writing_ || next_frame()) {
    const std::size_t header_bytes = current_.header.header_bytes();
    const std::size_t header_at = std::min(written_, header_bytes);
    const std::size_t payload_at = written_ - header_at;
    const iovec parts[2] = {
        {reinterpret_cast<std::byte*>(&current_.header) + header_at, header_bytes - header_at},
        {const_cast<std::byte*>(current_.payload) + payload_at,
         current_.payload_bytes - payload_at}};
    const std::size_t sent = stream_->write(parts, 2);
    if (sent == 0) return false;
    written_ += sent;
    if (written_ == header_bytes + current_.payload_bytes) frame_written();
  }
  return true;
}

void Connection::frame_written() {
  writing_ = false;
  current_.owned.reset();
  RequestState* request = current_.request;
  if (!request) {
    const FrameKind kind = current_.header.kind;
    if ((kind == FrameKind::accept || kind == FrameKind::done)) --offered_;
    return;
  }
  if (current_.header.kind == FrameKind::data) {
    request->moved += current_.payload_bytes;
    streaming_.pop_front();
    if (request->moved < request->bytes) return streams_on(request);
  }
  ledger_.finish(*request, request->bytes);
}

// Messages of one communicator go one after another; those of several take turns.
void Connection::streams_on(RequestState* request) {
  const auto is_own = [&](RequestState* each) { return each->context == request->context; };
  const auto next = std::find_if_not(streaming_.begin(), streaming_.end(), is_own);
  if (next == streaming_.end()) return streaming_.push_front(request);
  RequestState* const others = *next;
  streaming_.erase(next);
  streaming_.insert(std::find_if(streaming_.begin(), streaming_.end(), is_own), request);
  streaming_.push_front(others);
}

void Connection::own_current_payload() {
  own_payload(current_, current_.payload, current_.payload_bytes);
  current_.request = nullptr;
}

bool Connection::release(RequestState& request) {
  if (!request.is_send) {
    if (sink_request_ == &request) sink_request_ = nullptr, sink_ = nullptr;
    if (sink_arrival_ && sink_arrival_->receiver == &request) {
      sink_arrival_->receiver = nullptr;
      dropped(sink_arrival_->bytes);
    }
    for (auto& [id, incoming] : accepted_)
      if (incoming.request == &request) incoming.request = nullptr;
    for (auto at = pulls_.begin(); at != pulls_.end(); ++at) {
      if (at->request != &request) continue;
      at->given = Pulling::Given::up;
      if (!stream_->abandon(at->pull)) return false;
      queue({.kind = FrameKind::done, .id = at->pull.id});
      pulls_.erase(at);
      break;
    }
    return true;
  }
  if (writing_ && current_.request == &request) own_current_payload();
  const auto never_sent = std::erase_if(frames_, [&](const Outgoing& frame) {
    const bool eager = frame.request == &request;
    if (eager) eager_outstanding_ -= frame.payload_bytes + kMessageOverheadBytes;
    return eager || (is_offer(frame.header.kind) && frame.header.id == request.id);
  });
  const auto is_its = [&](const ChipCopying& copying) { return copying.to_stream == &request; };
  if (std::erase(streaming_, &request) + std::erase_if(chip_copies_, is_its) > 0) {
    queue({.kind = FrameKind::cancel, .id = request.id});
    return true;
  }
  const auto offer = offers_.find(request.id);
  if (offer == offers_.end() || offer->second != &request) return true;
  if (never_sent > 0) {
    offer_ended(request.id);
    return true;
  }
  queue({.kind = FrameKind::cancel, .id = request.id});
  // The peer's chip may be at it already, and asks nobody.
  const bool chip_reads = request.chip && stream_->is_within_host();
  if (chip_reads || !stream_->take_back(request.id)) return false;
  offer->second = nullptr;
  return true;
}

void Connection::end() {
  release_all();
  matcher_.remove_incomplete(peer_.rank);
  frames_.clear();
  writing_ = false;
  stream_.reset();
}

void Connection::release_all() {
  if (stream_) {
    stream_->withdraw();
    for (const auto& [id, request] : offers_) stream_->conceal(id);
  }
  if (writing_ && current_.request) own_current_payload();
  std::erase_if(frames_,
                [](const Outgoing& frame) { return frame.request || is_offer(frame.header.kind); });
  streaming_.clear();
  offers_.clear();
  sink_ = nullptr;
  sink_request_ = nullptr;
  if (sink_arrival_) sink_arrival_->receiver = nullptr;
  for (auto& [id, incoming] : accepted_) incoming.request = nullptr;
  pulls_.clear();
  chip_copies_.clear();
}

}  // namespace dicomm
