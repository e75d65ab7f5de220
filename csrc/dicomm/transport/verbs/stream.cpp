#include "transport/verbs/stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/deadline.h"
#include "core/text.h"

namespace dicomm::verbs {

namespace {

constexpr int kSlotsAtOnce = 16;

void watch(const Fd& epoll, int fd, int which) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = static_cast<std::uint64_t>(which);
  ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event);
}

constexpr int kSocketEvent = kMaxRails;

std::string meaning(const ibv::Library& library, int status) {
  std::string words = library.wc_status_str(status);
  if (status == ibv::kRnrRetryExceeded) words += ": the peer's receive buffers ran out";
  return words;
}

}  // namespace

VerbsStream::VerbsStream(std::shared_ptr<Rails> rails, Links links, Fd socket, const Card& theirs,
                         bool dialler)
    : rails_(std::move(rails)),
      links_(std::move(links)),
      socket_(std::move(socket)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      window_(std::min(kSlots, theirs.slots)),
      slot_bytes_(std::min(kSlotBytes, theirs.slot_bytes)) {
  if (!epoll_) throw Error(kNoDescriptors);
  watch(epoll_, socket_.get(), kSocketEvent);
  for (std::size_t i = 0; i < links_.size(); ++i)
    if (links_[i]) watch(epoll_, links_[i]->pair.fd(), static_cast<int>(i));
  if (!dialler) return;
  try {
    for (std::size_t i = 0; i < links_.size(); ++i) {
      if (!links_[i]) continue;
      links_[i]->heard = true;
      send_empty(static_cast<int>(i));
    }
  } catch (const StreamEnd& end) {
    end_ = end;
  }
}

// The queue pairs go before the memory that they send from, and after what came in their own.
VerbsStream::~VerbsStream() {
  arrived_.clear();
  links_.clear();
  while (released_ + 1 != next_) rails_->send_slots->give_back(slots_[++released_ % kSlots]);
  if (empties_.data) rails_->send_slots->give_back(empties_);
}

Slot VerbsStream::take_slot() {
  try {
    return rails_->send_slots->take();
  } catch (const Error& error) {
    throw StreamEnd{error.what(), false};
  }
}

// What the peer has consumed is free, unless the rail has yet to send it: after another rail failed
// it sends slots for the second time.
void VerbsStream::release_slots() {
  std::uint32_t last = consumed_by_peer_;
  if (rail_ != kNone) {
    const Link& link = *links_[rail_];
    const std::uint32_t sent = next_ - 1 - (link.sent - link.sent_consumed);
    if (static_cast<std::int32_t>(sent - last) < 0) last = sent;
  }
  while (static_cast<std::int32_t>(last - released_) > 0)
    rails_->send_slots->give_back(slots_[++released_ % kSlots]);
}

SlotHeader VerbsStream::header(std::uint32_t sequence) {
  SlotHeader header{};
  header.sequence = sequence;
  header.consumed = consumed_told_ = consumed_;
  header.consumed_rail = static_cast<std::uint8_t>(rail_in_);
  if (links_[rail_in_]) header.consumed_here = links_[rail_in_]->consumed;
  for (std::size_t i = 0; i < links_.size(); ++i)
    if (links_[i] && links_[i]->up()) header.rails_up |= 1 << i;
  header.magic = kSlotMagic;
  return header;
}

// The first rail that works; it stays until it fails.
void VerbsStream::choose_rail() {
  for (std::size_t i = 0; rail_ == kNone && i < links_.size(); ++i)
    if (links_[i] && links_[i]->up() && links_[i]->heard) rail_ = static_cast<int>(i);
}

bool VerbsStream::can_write() const {
  if (next_ - consumed_by_peer_ > window_) return false;
  if (on_socket_) return true;
  if (rail_ == kNone) return false;
  const Link& link = *links_[rail_];
  return link.sent - link.sent_consumed < window_ && link.has_send_room();
}

std::size_t VerbsStream::write(const iovec* parts, int count) {
  if (end_) throw *end_;
  if (peer_gone_) throw *peer_gone_;
  std::size_t written = 0, part = 0, offset = 0;
  const std::size_t part_count = static_cast<std::size_t>(count);
  if (!can_write()) progress();
  release_slots();
  std::uint32_t first = next_;
  while (true) {
    while (part < part_count && offset == parts[part].iov_len) ++part, offset = 0;
    if (part == part_count || !can_write() || next_ - first == kSlotsAtOnce) break;
    std::byte* slot = (slots_[next_ % kSlots] = take_slot()).data;
    std::size_t filled = sizeof(SlotHeader);
    while (part < part_count && filled < slot_bytes_) {
      const std::size_t bytes = std::min(parts[part].iov_len - offset, slot_bytes_ - filled);
      if (bytes > 0)
        std::memcpy(slot + filled, static_cast<const std::byte*>(parts[part].iov_base) + offset,
                    bytes);
      filled += bytes;
      offset += bytes;
      if (offset == parts[part].iov_len) ++part, offset = 0;
    }
    written += filled - sizeof(SlotHeader);
    slot_lengths_[next_ % kSlots] = static_cast<std::uint32_t>(filled);
    ++next_;
    // Counted here, so that can_write() sees it.
    if (!on_socket_) ++links_[rail_]->sent, ++links_[rail_]->sends_posted;
  }
  if (next_ != first) post_slots(first, next_ - first);
  return written;
}

// Slots [first, first + count), filled and counted already; one doorbell for all.
void VerbsStream::post_slots(std::uint32_t first, std::uint32_t count) {
  ibv::SendRequest requests[kSlots];
  ibv::Piece pieces[kSlots];
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t sequence = first + i;
    const Slot& memory = slots_[sequence % kSlots];
    std::byte* slot = memory.data;
    const std::uint32_t bytes = slot_lengths_[sequence % kSlots];
    const SlotHeader words = header(sequence);
    std::memcpy(slot, &words, sizeof words);
    if (on_socket_) {
      send_on_socket(SocketMessage::slot, slot, bytes);
      continue;
    }
    Link& link = *links_[rail_];
    pieces[i] = {reinterpret_cast<std::uint64_t>(slot), bytes, memory.lkey(link.device_index)};
    requests[i] = {};
    requests[i].pieces = &pieces[i];
    requests[i].piece_count = 1;
    requests[i].opcode = ibv::SendOpcode::send;
    if (link.peer.abridges)
      if (const auto immediate = link.fronts_out.abridge(slot, bytes)) {
        pieces[i].address += sizeof(Fronts::Front);
        pieces[i].bytes -= sizeof(Fronts::Front);
        requests[i].opcode = ibv::SendOpcode::send_imm;
        requests[i].immediate = *immediate;
      }
    requests[i].next = i + 1 < count ? &requests[i + 1] : nullptr;
    requests[i].id =
        send_work << kWorkShift | static_cast<std::uint32_t>(link.sends_posted - count + i + 1);
    if (pieces[i].bytes <= link.pair.inline_bytes()) requests[i].flags |= ibv::kInline;
    if (++link.unsignaled == kSignalEvery) {
      requests[i].flags |= ibv::kSignaled;
      link.unsignaled = 0;
    }
  }
  if (on_socket_) return;
  const int rail = rail_;
  try {
    links_[rail]->pair.post(requests);
  } catch (const RailError& error) {
    fail(rail, error.what());  // the slots go out again, on another
  }
}

void VerbsStream::send_empty(int rail, bool signaled) {
  const SlotHeader words = header(0);
  if (on_socket_) return send_on_socket(SocketMessage::slot, &words, sizeof words);
  Link& link = *links_[rail];
  if (!link.has_send_room()) {
    announce_ = true;
    return;
  }
  ibv::SendRequest request{};
  ibv::Piece piece{reinterpret_cast<std::uint64_t>(&words), sizeof words, 0};
  if (sizeof words <= link.pair.inline_bytes()) {
    request.flags |= ibv::kInline;
  } else {
    if (!empties_.data) empties_ = take_slot();
    std::byte* place =
        empties_.data + std::size_t{empties_sent_++ % kSpareSlots} * sizeof(SlotHeader);
    std::memcpy(place, &words, sizeof words);
    piece.address = reinterpret_cast<std::uint64_t>(place);
    piece.lkey = empties_.lkey(link.device_index);
  }
  request.pieces = &piece;
  request.piece_count = 1;
  request.opcode = ibv::SendOpcode::send;
  request.id = send_work << kWorkShift | ++link.sends_posted;
  if (signaled || ++link.unsignaled >= kSignalEvery) {
    request.flags |= ibv::kSignaled;
    link.unsignaled = 0;
  }
  try {
    link.pair.post(&request);
  } catch (const RailError& error) {
    fail(rail, error.what());
  }
}

// Collects what ended on every rail, and does what follows from it.
void VerbsStream::progress() {
  if (end_) return;
  try {
    for (std::size_t i = 0; i < links_.size(); ++i)
      if (links_[i] && links_[i]->up()) poll_rail(static_cast<int>(i));
    for (std::size_t i = 0; i < links_.size(); ++i)
      if (links_[i] && links_[i]->up() && !(rails_up_there_ >> i & 1))
        fail(static_cast<int>(i), "its other end failed");
    if (rail_ == kNone && !on_socket_) {
      choose_rail();
      if (rail_ != kNone) send_again();  // what a rail that failed meanwhile may not have brought
    }
    if (consumed_ - consumed_told_ >= window_ / 2) announce_ = true;
    if (announce_ && (rail_ != kNone || on_socket_)) {
      announce_ = false;
      send_empty(rail_);
    }
    release_slots();
    if (finishing_ && !shut_) finish();
    if (!socket_out_.empty()) flush_socket();
  } catch (const StreamEnd& end) {
    end_ = end;
  }
}

void VerbsStream::poll_rail(int rail) {
  Link& link = *links_[rail];
  try {
    link.receives().check();
  } catch (const RailError& error) {
    return fail(rail, error.what());
  }
  ibv::Completion completions[16];
  int count;
  do {
    count = link.pair.poll(completions, 16);
    if (count < 0) return fail(rail, "its device does not tell what became of its work");
    for (int i = 0; i < count; ++i) {
      const std::span others(completions + i + 1, completions + count);
      if (completions[i].status != ibv::kSuccess) return failed(rail, completions[i], others);
      try {
        completed(rail, completions[i]);
      } catch (...) {  // others' messages arrive in these buffers, too
        for (const ibv::Completion& other : others) link.drop(other);
        throw;
      }
    }
  } while (count == 16);
}

// One completion tells why; the others were flushed, or count no more.
void VerbsStream::failed(int rail, const ibv::Completion& first,
                         std::span<const ibv::Completion> others) {
  Link& link = *links_[rail];
  link.pair.close();
  int status = link.drop(first);
  for (const ibv::Completion& other : others)
    if (link.drop(other) != ibv::kSuccess && status == ibv::kFlushed) status = other.status;
  if (status == ibv::kFlushed) status = link.drain();
  fail(rail, status != ibv::kFlushed
                 ? meaning(rails_->devices[link.device_index]->library(), status)
                 : "its device gave up the connection (is the port down?)");
}

void VerbsStream::completed(int rail, const ibv::Completion& completion) {
  Link& link = *links_[rail];
  const std::uint64_t id = completion.id & ((std::uint64_t{1} << kWorkShift) - 1);
  switch (completion.id >> kWorkShift) {
    case receive_work: {
      Received buffer = link.receives().take(static_cast<std::uint32_t>(id));
      std::byte* slot = buffer.get();
      std::size_t bytes = completion.bytes;
      if (completion.flags & ibv::kWithImmediate) {
        slot -= sizeof(Fronts::Front);
        bytes += sizeof(Fronts::Front);
        if (!link.fronts_in.restore(slot, completion.immediate))
          throw StreamEnd{"it sent a malformed slot (without a front)"};
      } else {
        link.fronts_in.remember(slot, bytes);
      }
      return arrive(rail, std::move(buffer), slot, bytes);
    }
    case send_work:
      link.sends_completed = static_cast<std::uint32_t>(id);
      return;
    default:
      return read_done(id);
  }
}

void VerbsStream::arrive(int rail, Received buffer, const std::byte* slot, std::size_t bytes,
                         std::unique_ptr<std::byte[]> owned) {
  SlotHeader header;
  if (bytes < sizeof header) throw StreamEnd{"it sent a malformed slot (too short)"};
  std::memcpy(&header, slot, sizeof header);
  if (header.magic != kSlotMagic) throw StreamEnd{"it sent a malformed slot (out of step)"};
  heard(rail, header);
  if (bytes == sizeof header) return;
  Arrived arrived{rail, std::move(buffer), slot + sizeof header, bytes - sizeof header,
                  std::move(owned)};
  Link* link = rail == kNone ? nullptr : links_[rail].get();
  // A peer that closed a rail counts no more what was consumed there: what comes is a late double.
  if (link && rails_up_there_ >> rail & 1) rail_in_ = rail;
  if (header.sequence == expected_) {
    if (arrived_.size() == kSlots) throw StreamEnd{"it sent a malformed slot (over its window)"};
    ++expected_;
    arrived_.push_back(std::move(arrived));
    return;
  }
  if (static_cast<std::int32_t>(header.sequence - expected_) > 0)
    throw StreamEnd{"it sent a malformed slot (one before is missing)"};
  announce_ = true;  // a double, after a rail failed
  if (link) ++link->consumed;
}

// What a slot says besides its bytes.
void VerbsStream::heard(int rail, const SlotHeader& header) {
  if (rail != kNone) links_[rail]->heard = true;
  // Of two rails the later news may be polled first.
  const auto more = static_cast<std::int32_t>(header.consumed - consumed_by_peer_);
  if (more > 0 && static_cast<std::uint32_t>(more) >= next_ - consumed_by_peer_)
    throw StreamEnd{"it sent a malformed slot (it has read more than was sent)"};
  if (more > 0) consumed_by_peer_ = header.consumed;
  if (header.consumed_rail < links_.size() && links_[header.consumed_rail]) {
    Link& link = *links_[header.consumed_rail];
    if (header.consumed_here - link.sent_consumed <= link.sent - link.sent_consumed)
      link.sent_consumed = header.consumed_here;
  }
  if (rail == kNone) return;
  rails_up_there_ &= header.rails_up;
}

std::size_t VerbsStream::read(void* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  if (arrived_.empty()) progress();
  if (arrived_.empty()) {
    if (end_) throw *end_;
    if (peer_gone_) throw *peer_gone_;
    return 0;
  }
  Arrived& slot = arrived_.front();
  const std::size_t taken = std::min(bytes, slot.bytes);
  std::memcpy(data, slot.data, taken);
  slot.data += taken;
  slot.bytes -= taken;
  if (slot.bytes > 0) return taken;
  ++consumed_;
  if (slot.rail != kNone) ++links_[slot.rail]->consumed;
  arrived_.pop_front();
  return taken;
}

void VerbsStream::on_event() {
  epoll_event events[kMaxRails + 1];
  const int count = ::epoll_wait(epoll_.get(), events, kMaxRails + 1, 0);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t which = events[i].data.u64;
    if (which < links_.size())
      links_[which]->pair.collect_events();
    else
      read_socket();
  }
}

bool VerbsStream::prepare_sleep(bool want_to_write) {
  if (!arrived_.empty()) return false;
  for (const auto& link : links_)
    if (link && link->up()) link->pair.arm();
  progress();
  return arrived_.empty() && !end_ && !peer_gone_ && socket_out_.empty() &&
         !(want_to_write && can_write());
}

LinkDescription VerbsStream::describe() const {
  LinkDescription description{"verbs", {}, {}};
  for (const auto& link : links_)
    if (link)
      description.rails.push_back(
          {link->pair.rail().describe(), link->gid ? verbs::describe(link->gid->gid) : "",
           link->gid ? verbs::describe(link->peer.gid) : "", link->pair.mtu_bytes(), link->up(),
           link->cm_id ? "cm" : "bootstrap"});
  return description;
}

void VerbsStream::finish_writing() {
  finishing_ = true;
  progress();
}

// The socket's end must not overtake what was written: all of it is in the peer's hands once the
// last send has ended.
void VerbsStream::finish() {
  if (!on_socket_ && rail_ != kNone) {
    if (!last_sent_) {
      if (!links_[rail_]->has_send_room()) return;
      last_sent_ = true;
      send_empty(rail_, true);
      if (!last_sent_) return;  // the rail failed: it goes out on another
    }
    if (links_[rail_]->sends_completed != links_[rail_]->sends_posted) return;
  }
  flush_socket();
  if (!socket_out_.empty()) return;
  shut_ = true;
  ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace dicomm::verbs
