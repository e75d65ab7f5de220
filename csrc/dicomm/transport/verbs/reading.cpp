// Long messages: the receiver reads them from the sender's memory, chunk by chunk, over all rails.
#include <algorithm>
#include <chrono>
#include <thread>

#include "transport/verbs/stream.h"

namespace dicomm::verbs {

namespace {

constexpr std::uint64_t kMaxChunkBytes = 1 << 20;
constexpr std::uint64_t kMinChunkBytes = 64 << 10;
constexpr std::chrono::seconds kFlushTimeout{1};

// Enough pieces that every rail is busy to the end.
std::uint64_t chunk_bytes(std::uint64_t message, std::size_t rails) {
  const std::uint64_t share = message / (2 * rails);
  const std::uint64_t rounded = (share + kMinChunkBytes - 1) / kMinChunkBytes * kMinChunkBytes;
  return std::clamp(rounded, kMinChunkBytes, kMaxChunkBytes);
}

}  // namespace

MemoryKeys VerbsStream::expose(std::uint64_t id, const void* data, std::size_t bytes) {
  MemoryKeys keys{};
  auto registration = bytes > 0 ? rails_->memory->acquire(data, bytes) : nullptr;
  if (!registration) return keys;
  for (std::size_t i = 0; i < links_.size(); ++i)
    if (links_[i])
      if (const auto& there = registration->on(links_[i]->device_index)) keys[i] = there->rkey;
  exposed_.emplace(id, std::move(registration));
  return keys;
}

bool VerbsStream::reaches(const Pull& pull, const Registration& into, std::size_t rail) const {
  const auto& link = links_[rail];
  return link && link->up() && pull.keys[rail] != 0 && into.on(link->device_index).has_value();
}

// Also makes ready for it: memory that no device can write to cannot be pulled into.
bool VerbsStream::can_pull(const Pull& pull) {
  if (on_socket_ || readings_.contains(pull.id)) return false;
  if (std::all_of(pull.keys.begin(), pull.keys.end(), [](auto key) { return key == 0; }))
    return false;
  auto into = rails_->memory->acquire(pull.data, pull.bytes);
  if (!into) return false;
  std::size_t rails = 0;
  std::uint64_t largest = kMaxChunkBytes;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (!reaches(pull, *into, i)) continue;
    ++rails;
    largest = std::min<std::uint64_t>(largest, links_[i]->pair.rail().attributes.max_msg_bytes);
  }
  if (rails == 0 || largest == 0) return false;
  Reading& reading = readings_[pull.id];
  reading.pull = pull;
  reading.into = std::move(into);
  reading.step_bytes = std::min(largest, chunk_bytes(pull.bytes, rails));
  reading.begin();
  return true;
}

void VerbsStream::Reading::begin() {
  rails.clear();
  for (std::uint64_t at = 0; at < pull.bytes; at += step_bytes)
    to_do.push_back({at, static_cast<std::uint32_t>(std::min(step_bytes, pull.bytes - at))});
}

Pulled VerbsStream::pull(Pull& pull, bool with_sender) {
  if (!end_ && !on_socket_) progress();
  if (end_) throw *end_;
  if (on_socket_) return Pulled::withdrawn;
  const auto found = readings_.find(pull.id);
  if (found == readings_.end()) throw StreamEnd{"it withdrew a message's memory"};
  Reading& reading = found->second;
  for (int rail; !reading.to_do.empty() && (rail = rail_for(reading)) != kNone;)
    if (!start_read(pull.id, reading, rail))
      return this->pull(pull, with_sender);  // over the rails left
  if (!reading.to_do.empty() || reading.under_way > 0) return Pulled::waiting;
  if (!flush(reading)) return this->pull(pull, with_sender);
  pull.moved = pull.bytes;
  readings_.erase(found);
  return Pulled::moved;
}

// The least busy rail that can take one more read of it.
int VerbsStream::rail_for(const Reading& reading) const {
  int best = kNone;
  bool any = false;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (!reaches(reading.pull, *reading.into, i)) continue;
    any = true;
    if (!links_[i]->heard || !links_[i]->has_read_room()) continue;
    if (best == kNone || links_[i]->reads < links_[best]->reads) best = static_cast<int>(i);
  }
  if (!any) throw StreamEnd{"no remaining rail reaches a message's memory; " + failures_};
  return best;
}

// False: the rail failed, and with the last one `reading` may be gone, too.
bool VerbsStream::start_read(std::uint64_t id, Reading& reading, int rail) {
  Link& link = *links_[rail];
  const Chunk chunk = reading.to_do.front();
  ibv::Piece piece{reinterpret_cast<std::uint64_t>(reading.pull.data) + chunk.offset, chunk.bytes,
                   reading.into->on(link.device_index)->lkey};
  ibv::SendRequest request{};
  request.id = read_work << kWorkShift | next_read_;
  request.pieces = &piece;
  request.piece_count = 1;
  request.opcode = ibv::SendOpcode::rdma_read;
  request.flags = ibv::kSignaled;
  request.remote_address = reading.pull.address + chunk.offset;
  request.rkey = reading.pull.keys[rail];
  try {
    link.pair.post(&request);
  } catch (const RailError& error) {
    fail(rail, error.what());
    return false;
  }
  reading.to_do.pop_front();
  reading.rails.insert(rail);
  ++reading.under_way;
  ++link.reads;
  reads_.emplace(next_read_++, Read{id, chunk, rail});
  return true;
}

void VerbsStream::read_done(std::uint64_t number) {
  const auto found = reads_.find(number);
  if (found == reads_.end()) return;
  --links_[found->second.rail]->reads;
  --readings_.at(found->second.id).under_way;
  reads_.erase(found);
}

// The next to look at a chip's memory may be the chip; the host's own needs no flush. False: a rail
// failed, so that all is to do again over the rails left, and with the last one `reading` may be
// gone.
bool VerbsStream::flush(Reading& reading) {
  for (const int rail : reading.rails) {
    const Link& link = *links_[rail];
    const auto& into = reading.into->on(link.device_index);
    if (!into || !into->is_chips) continue;
    std::string wrong;
    try {
      if (link.up()) {
        rails_->flush(link.pair.rail(), reinterpret_cast<std::uint64_t>(reading.pull.data),
                      into->rkey);
        continue;
      }
    } catch (const Error& error) {
      wrong = error.what();
    }
    reading.begin();
    if (link.up()) fail(rail, wrong);
    return false;
  }
  return true;
}

// Of a closed rail: until then they may still write. The device flushes them at once; one that
// does not has its queue pair destroyed.
void VerbsStream::await_reads(int rail) {
  Link& link = *links_[rail];
  const auto deadline = std::chrono::steady_clock::now() + kFlushTimeout;
  while (link.reads > 0 && std::chrono::steady_clock::now() < deadline) {
    link.drain();
    if (link.reads > 0) std::this_thread::yield();
  }
  if (link.reads > 0) link.pair.destroy();
}

// A failed rail's reads are to do again.
void VerbsStream::reissue_reads(int rail) {
  for (auto at = reads_.begin(); at != reads_.end();) {
    if (at->second.rail != rail) {
      ++at;
      continue;
    }
    Reading& reading = readings_.at(at->second.id);
    --reading.under_way;
    if (!reading.given_up) reading.to_do.push_front(at->second.chunk);
    at = reads_.erase(at);
  }
  links_[rail]->reads = 0;
}

bool VerbsStream::pulls_in_background() const {
  if (on_socket_ || end_) return false;
  for (const auto& [id, reading] : readings_) {
    if (reading.to_do.empty()) {
      if (reading.under_way == 0) return false;
      continue;
    }
    for (std::size_t i = 0; i < links_.size(); ++i)
      if (reaches(reading.pull, *reading.into, i) && links_[i]->heard && links_[i]->has_read_room())
        return false;
  }
  return true;
}

bool VerbsStream::abandon(Pull& pull) {
  const auto found = readings_.find(pull.id);
  if (found == readings_.end()) return true;
  found->second.given_up = true;
  found->second.to_do.clear();
  progress();
  const auto left = readings_.find(pull.id);
  if (left == readings_.end()) return true;
  if (left->second.under_way > 0) {
    if (!end_) return false;
    close_rails();  // nobody asks any more what ended
    reads_.clear();
  }
  readings_.erase(left);
  return true;
}

}  // namespace dicomm::verbs
