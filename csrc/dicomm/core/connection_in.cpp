// The reading half of a Connection.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/connection.h"
#include "core/text.h"

namespace dicomm {

namespace {

// One peer's flood must not keep the others waiting.
constexpr int kFramesPerTurn = 64;
constexpr std::size_t kDiscardBytes = 64 << 10;

[[noreturn]] void malformed(const char* what) {
  throw StreamEnd{text("it sent a malformed frame (", what, ")")};
}

// A peer that does not keep to what both sides know is not to take this side's memory.
[[noreturn]] void too_much(const std::string& what) {
  throw StreamEnd{text("it sent ", what, " that nobody here had asked for, and was cut off"),
                  false};
}

}  // namespace

bool Connection::receive() {
  bool progressed = false;
  for (int frames = 0; frames < kFramesPerTurn && !has_left_; ++frames) {
    if (!header_read_ && !read_header(progressed)) return progressed;
    if (!read_payload()) return true;
    end_frame();
    header_read_ = false;
    if (!words_.empty()) return true;  // heeded before what follows
  }
  return progressed;
}

bool Connection::read_header(bool& progressed) {
  // The length of a header is known once its short part is there.
  std::size_t wanted =
      header_got_ < FrameHeader::kShortBytes ? FrameHeader::kShortBytes : header_.header_bytes();
  while (header_got_ < wanted) {
    const std::size_t got =
        stream_->read(reinterpret_cast<std::byte*>(&header_) + header_got_, wanted - header_got_);
    if (got == 0) return false;
    progressed = true;
    header_got_ += got;
    if (header_got_ == FrameHeader::kShortBytes) wanted = header_.header_bytes();
  }
  if (!header_.is_long) header_.address = 0, header_.delivered_at_ns = 0;
  header_got_ = 0;
  header_read_ = true;
  begin_frame();
  return true;
}

bool Connection::read_payload() {
  static thread_local std::byte discarded[kDiscardBytes];
  std::size_t budget = kChunkBytes;
  while (payload_left_ > 0) {
    if (budget == 0) return false;
    const std::size_t wanted =
        std::min({payload_left_, sink_ ? kChunkBytes : kDiscardBytes, budget});
    const std::size_t got = stream_->read(sink_ ? sink_ : discarded, wanted);
    if (got == 0) return false;
    if (sink_) sink_ += got;
    payload_left_ -= got;
    budget -= got;
  }
  return true;
}

void Connection::begin_frame() {
  if (header_.magic != FrameHeader::kMagic) malformed("out of step");
  eager_outstanding_ -= std::min<std::size_t>(eager_outstanding_, header_.credit);
  sink_ = nullptr;
  payload_left_ = header_.payload_bytes();
  if (header_.kind == FrameKind::eager) {
    if (header_.bytes > kCreditBytes) malformed("a message too long to come unasked");
    begin_eager();
  } else if (header_.kind == FrameKind::data) {
    const auto found = accepted_.find(header_.id);
    if (found == accepted_.end()) return;  // cancelled meanwhile
    Incoming& incoming = found->second;
    if (header_.bytes > incoming.bytes - incoming.moved) malformed("more data than offered");
    if (incoming.request) sink_ = incoming.request->data + incoming.moved;
    sink_request_ = incoming.request;
  } else if (header_.kind == FrameKind::offer) {
    sink_ = reinterpret_cast<std::byte*>(sink_keys_.data());
  } else if (header_.kind == FrameKind::offer_chip) {
    sink_ = reinterpret_cast<std::byte*>(&sink_handle_);
  } else if (header_.kind == FrameKind::abort) {
    if (header_.bytes > kMaxReasonBytes) malformed("an endless reason");
    sink_text_.resize(header_.bytes);
    sink_ = reinterpret_cast<std::byte*>(sink_text_.data());
  }
}

void Connection::begin_eager() {
  sink_request_ = matcher_.match(peer_.rank, header_.tag, header_.context);
  if (sink_request_) {
    if (fits(*sink_request_, header_.bytes))
      sink_ = sink_request_->on_host();
    else
      sink_request_ = nullptr;
    consumed(header_.bytes);
    return;
  }
  if (matcher_.has_ended(header_.context)) return consumed(header_.bytes);
  if (held_ + header_.bytes + kMessageOverheadBytes > kCreditBytes)
    too_much(text("more than ", kCreditBytes, " bytes"));
  held_ += header_.bytes + kMessageOverheadBytes;
  sink_arrival_ = std::make_shared<Arrival>();
  sink_arrival_->peer = peer_.rank;
  sink_arrival_->context = header_.context;
  sink_arrival_->tag = header_.tag;
  sink_arrival_->bytes = header_.bytes;
  sink_arrival_->delivered_at_ns = header_.delivered_at_ns;
  sink_arrival_->payload = std::make_unique_for_overwrite<std::byte[]>(header_.bytes);
  sink_ = sink_arrival_->payload.get();
  matcher_.keep(sink_arrival_);
}

void Connection::end_eager() {
  if (sink_request_) {
    deliver(*sink_request_, header_.bytes, header_.delivered_at_ns);
  } else if (sink_arrival_) {
    sink_arrival_->complete = true;
    if (RequestState* receiver = sink_arrival_->receiver) receive_arrival(*receiver, sink_arrival_);
  }
  sink_request_ = nullptr;
  sink_arrival_.reset();
}

void Connection::end_frame() {
  switch (header_.kind) {
    case FrameKind::eager:
      return end_eager();
    case FrameKind::offer:
    case FrameKind::offer_chip:
      return end_offer();
    case FrameKind::accept:
      return stream_accepted(header_.id);
    case FrameKind::data: {
      sink_request_ = nullptr;
      const auto found = accepted_.find(header_.id);
      if (found == accepted_.end()) return;
      Incoming& incoming = found->second;
      incoming.moved += header_.bytes;
      if (incoming.moved < incoming.bytes) return;
      if (incoming.request)
        deliver(*incoming.request, incoming.bytes, incoming.request->delivered_at);
      accepted_.erase(found);
      return;
    }
    case FrameKind::done:
      if (RequestState* request = offer_ended(header_.id)) ledger_.finish(*request, request->bytes);
      return;
    case FrameKind::cancel:
      return taken_back(header_.id);
    case FrameKind::credit:
      return;
    case FrameKind::abort:
    case FrameKind::join:
    case FrameKind::leave:
      return said(header_.kind);
    case FrameKind::goodbye:
      has_left_ = true;
      return;
  }
  malformed("of an unknown kind");
}

void Connection::said(FrameKind kind) {
  const std::uint32_t context = header_.context;
  if (kind == FrameKind::join) {
    if (joined_.size() == kMaxContexts) too_much(text("more than ", kMaxContexts, " groups"));
    if (!joined_.emplace(context, true).second) malformed("a group joined twice");
  } else if (const auto found = joined_.find(context); found != joined_.end()) {
    found->second = false;
  }
  words_.push_back({kind, context, kind == FrameKind::abort ? as_utf8(sink_text_) : ""});
}

void Connection::end_offer() {
  if (offered_ == kMaxOffers) too_much(text("more than ", kMaxOffers, " offers"));
  ++offered_;
  if (matcher_.has_ended(header_.context))
    return queue({.kind = FrameKind::done, .id = header_.id});
  auto offer = std::make_shared<Arrival>();
  offer->peer = peer_.rank;
  offer->context = header_.context;
  offer->tag = header_.tag;
  offer->bytes = header_.bytes;
  offer->id = header_.id;
  offer->delivered_at_ns = header_.delivered_at_ns;
  offer->offered = true;
  offer->address = header_.address;
  offer->keys = sink_keys_;
  if (header_.kind == FrameKind::offer_chip)
    offer->chip = std::make_unique<MemoryHandle>(sink_handle_);
  if (RequestState* request = matcher_.match(peer_.rank, header_.tag, header_.context))
    return receive_offer(*request, *offer);
  matcher_.keep(std::move(offer));
}

void Connection::stream_accepted(std::uint32_t id) {
  RequestState* request = offer_ended(id);
  if (!request) return;
  if (request->bytes == 0 || request->outcome != Outcome::success)
    return ledger_.finish(*request, 0);  // a cancel is on its way where nobody wants it sent
  request->on_host();
  if (request->after)
    chip_copies_.push_back({request, id, request->context, std::move(request->after),
                            std::chrono::steady_clock::now()});
  else
    streaming_.push_back(request);
}

// The peer is through with an offered buffer. Null: not an offer of ours, or not any more.
RequestState* Connection::offer_ended(std::uint32_t id) {
  const auto offer = offers_.find(id);
  if (offer == offers_.end()) return nullptr;
  RequestState* request = offer->second;
  offers_.erase(offer);
  stream_->conceal(id);
  return request;
}

bool Connection::fits(RequestState& request, std::uint64_t bytes) {
  if (bytes <= request.bytes) return true;
  ledger_.fail(request, Outcome::error,
               text("recv from ", peer_.describe(), ", tag ", request.tag, ": the message has ",
                    bytes, " bytes, the buffer only ", request.bytes));
  return false;
}

void Connection::deliver(RequestState& request, std::uint64_t bytes, std::int64_t delivered_at_ns) {
  request.delivered_at = delivered_at_ns;
  ledger_.finish(request, bytes);
}

void Connection::consumed(std::size_t bytes) {
  consumed_ += bytes + kMessageOverheadBytes;
  if (consumed_ >= kCreditBytes / 4 && !std::exchange(credit_queued_, true))
    queue({.kind = FrameKind::credit});
}

// A message that was held is not any more.
void Connection::dropped(std::size_t bytes) {
  held_ -= bytes + kMessageOverheadBytes;
  consumed(bytes);
}

void Connection::receive_arrival(RequestState& request, const std::shared_ptr<Arrival>& arrival) {
  request.peer_number = peer_.rank;
  if (arrival->offered) return receive_offer(request, *arrival);
  if (!arrival->complete) {
    arrival->receiver = &request;
    return;
  }
  dropped(arrival->bytes);
  if (!fits(request, arrival->bytes)) return;
  if (arrival->bytes > 0) std::memcpy(request.on_host(), arrival->payload.get(), arrival->bytes);
  deliver(request, arrival->bytes, arrival->delivered_at_ns);
}

void Connection::turn_down(const Arrival& arrival) {
  if (arrival.offered)
    queue({.kind = FrameKind::done, .id = arrival.id});
  else
    dropped(arrival.bytes);
}

void Connection::receive_offer(RequestState& request, const Arrival& offer) {
  if (!fits(request, offer.bytes)) return queue({.kind = FrameKind::done, .id = offer.id});
  request.delivered_at = offer.delivered_at_ns;
  if (offer.bytes == 0) {  // offered only for want of credit
    queue({.kind = FrameKind::done, .id = offer.id});
    return deliver(request, 0, offer.delivered_at_ns);
  }
  if (offer.chip) {
    if (!pull_by_chip(request, offer)) accept(request, offer.id, offer.bytes);
    return;
  }
  const Pull pull{offer.id, request.on_host(), offer.address, offer.bytes, offer.keys};
  if (stream_->can_pull(pull))
    pulls_.push_back({&request, pull});
  else
    accept(request, offer.id, offer.bytes);
}

void Connection::accept(RequestState& request, std::uint32_t id, std::uint64_t bytes) {
  request.on_host();
  accepted_.emplace(id, Incoming{&request, bytes});
  queue({.kind = FrameKind::accept, .id = id});
}

// The receiver need not wait for its chip; the sender's memory is needed until the chip is through.
// What a handle says is of one host, and clones of a virtual machine may seem to be that.
bool Connection::pull_by_chip(RequestState& request, const Arrival& offer) {
  const bool is_here = request.chip && stream_->is_within_host();
  auto copy = is_here ? request.chip->pull(*offer.chip, offer.bytes) : nullptr;
  if (!copy) return false;
  chip_copies_.push_back(
      {nullptr, offer.id, offer.context, std::move(copy), std::chrono::steady_clock::now()});
  deliver(request, offer.bytes, offer.delivered_at_ns);
  return true;
}

bool Connection::end_chip_copies() {
  const auto ended = std::erase_if(chip_copies_, [this](const ChipCopying& copying) {
    if (!copying.copy->done()) return false;
    if (copying.to_stream)
      streaming_.push_back(copying.to_stream);
    else
      queue({.kind = FrameKind::done, .id = copying.id});
    return true;
  });
  return ended > 0;
}

std::optional<std::chrono::steady_clock::time_point> Connection::chip_copies_since() const {
  if (chip_copies_.empty()) return std::nullopt;
  return chip_copies_.front().begun;
}

bool Connection::has_chip_copies(std::uint32_t context) const {
  return std::ranges::any_of(
      chip_copies_, [&](const ChipCopying& copying) { return copying.context == context; });
}

// A piece of as many messages as the stream moves at once; the others get their turn later. A
// sender that has a message of ours to copy leaves its own to us: where both copy the same message,
// cache lines go to and fro between them.
bool Connection::copy(bool both_sides) {
  both_sides &= offers_.empty();
  bool moved = end_chip_copies();
  std::size_t going = 0;
  for (auto at = pulls_.begin(); at != pulls_.end() && going < stream_->concurrent_pulls(); ++going)
    at = go_on(*at, both_sides, moved) ? std::next(at) : pulls_.erase(at);
  return stream_->push() || moved;
}

// False: the pull is over.
bool Connection::go_on(Pulling& pulling, bool both_sides, bool& moved) {
  if (pulling.given == Pulling::Given::no) switch (stream_->pull(pulling.pull, both_sides)) {
      case Pulled::withdrawn:
        return false;  // the sender aborts: its next frame says so
      case Pulled::refused:
        accept(*pulling.request, pulling.pull.id, pulling.pull.bytes);
        return false;
      case Pulled::moved:
        moved = true;
        break;
      case Pulled::waiting:
        break;
    }
  return !ended(pulling);
}

// Whether nothing more happens to the buffer; then tells those who wait for that.
bool Connection::ended(Pulling& pulling) {
  if (pulling.given != Pulling::Given::no ? !stream_->abandon(pulling.pull) : !pulling.pull.done())
    return false;
  queue({.kind = FrameKind::done, .id = pulling.pull.id});
  RequestState& request = *pulling.request;
  if (pulling.given == Pulling::Given::no)
    deliver(request, pulling.pull.bytes, request.delivered_at);
  else if (pulling.given == Pulling::Given::up)
    ledger_.finish(request, 0);
  else
    ledger_.fail(request, Outcome::error,
                 text("recv from ", peer_.describe(), ", tag ", request.tag,
                      ": the sender took the message back"));
  return true;
}

void Connection::taken_back(std::uint32_t id) {
  for (auto at = pulls_.begin(); at != pulls_.end(); ++at) {
    if (at->pull.id != id) continue;
    if (at->given == Pulling::Given::no) at->given = Pulling::Given::back;
    if (ended(*at)) pulls_.erase(at);
    return;
  }
  if (matcher_.remove_offer(peer_.rank, id)) return queue({.kind = FrameKind::done, .id = id});
  // Every other offer has been answered already, or will be once the chip is through.
  const auto accepted = accepted_.find(id);
  if (accepted == accepted_.end()) return;
  if (RequestState* request = accepted->second.request)
    ledger_.fail(*request, Outcome::error,
                 text("recv from ", peer_.describe(), ", tag ", request->tag,
                      ": the sender took the message back"));
  accepted_.erase(accepted);
}

}  // namespace dicomm
