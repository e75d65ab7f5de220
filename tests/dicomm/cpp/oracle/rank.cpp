#include "oracle/rank.h"

#include <algorithm>
#include <cstdio>

#include "core/text.h"
#include "support.h"

namespace dicomm::oracle {

namespace {

constexpr std::size_t kGuardBytes = 32;
constexpr std::byte kGuard{0xa5};
constexpr std::size_t kMaxPendingSends = 100;
constexpr std::size_t kMaxPendingReceives = 60;

}  // namespace

Rank::Buffer::Buffer(std::size_t bytes, unsigned misalignment)
    : memory(new std::byte[bytes + 2 * kGuardBytes + misalignment]),
      data(memory.get() + kGuardBytes + misalignment),
      bytes(bytes) {
  std::fill_n(data - kGuardBytes, kGuardBytes, kGuard);
  std::fill_n(data + bytes, kGuardBytes, kGuard);
}

void Rank::Buffer::expect_intact(const char* what) const {
  const auto guarded = [](std::byte b) { return b == kGuard; };
  if (!std::all_of(data - kGuardBytes, data, guarded) ||
      !std::all_of(data + bytes, data + bytes + kGuardBytes, guarded))
    throw Violation(text(what, " of ", bytes, " bytes wrote outside its buffer"));
}

Rank::Rank(const Plan& plan, Arena& arena, std::shared_ptr<Store> store, int rank)
    : plan_(plan),
      arena_(arena),
      store_(std::move(store)),
      rank_(rank),
      log_(arena.ranks[rank]),
      random_(plan.rank_seed(rank)) {
  log_.sends = log_.receives = 0;
}

void Rank::run() {
  for (int i = 0; i < kCommunicators; ++i) {
    Options options = testing::options(rank_, plan_.settings.ranks, plan_.settings.transport);
    options.name = text("epoch ", plan_.epoch, ", ", i);
    communicators_.push_back(Communicator::create(store_, options));
    groups_.push_back(std::make_unique<Group>(communicators_.back()));
    count();
  }
  for (step_ = 0; step_ < kStepsAnEpoch; ++step_) step();
  if (plan_.kind() == EpochKind::orderly) drain();
  sends_.clear();
  receives_.clear();
  groups_.clear();
  for (auto& communicator : communicators_) {
    communicator->close();
    count();
  }
  communicators_.clear();
}

void Rank::step() {
  if (plan_.kind() != EpochKind::orderly && rank_ == plan_.failing_rank() &&
      step_ == plan_.failing_step())
    fail_on_purpose();
  if (step_ % kStepsACollective == kStepsACollective - 1) return collective();
  const int choice = random(100);
  if (choice < 30)
    send_some();
  else if (choice < 62)
    post_some();
  else if (choice < 82)
    look_at_one(false);
  else if (choice < 96)
    look_at_one(true);
  else
    drop_one();
}

void Rank::fail_on_purpose() {
  const int which = random(kCommunicators);
  if (plan_.kind() == EpochKind::abort)
    communicators_[which]->abort("on purpose");
  else
    communicators_[which]->close();
  count();
}

int Rank::random_peer() {
  const int peer = random(plan_.settings.ranks - 1);
  return peer + (peer >= rank_);
}

int Rank::random_communicator() {
  const int which = random(kCommunicators);
  return dead_[which] ? -1 : which;
}

void Rank::send_some() {
  const int communicator = random_communicator();
  if (communicator < 0) return;
  const int to = random_peer();
  const int tag = random(kTags);
  for (int burst = chance(5) ? 10 : 1; burst > 0; --burst) {
    if (sends_.size() >= kMaxPendingSends || log_.sends >= kMaxRecords / 2) return;
    start_send({communicator, rank_, to, tag}, next_sequence_[communicator][to][tag]++);
  }
}

void Rank::start_send(const Channel& channel, std::uint64_t sequence) {
  const std::size_t bytes = plan_.message_bytes(channel, sequence);
  Send send{Buffer(bytes, random(64)), channel, sequence, log_.sends, nullptr};
  testing::fill(send.buffer.data, bytes, plan_.message_key(channel, sequence));
  if (bytes >= 8) std::memcpy(send.buffer.data, &sequence, 8);
  if (sequence != kEndSequence)
    log_.send[log_.sends++] = {
        static_cast<std::int8_t>(channel.communicator), static_cast<std::int8_t>(channel.to),
        static_cast<std::int8_t>(channel.tag), false, static_cast<std::uint32_t>(sequence)};
  count();
  send.request = communicators_[channel.communicator]->isend(send.buffer.data, bytes, channel.to,
                                                             plan_.tag_value(channel.tag));
  sends_.push_back(std::move(send));
}

void Rank::post_some() {
  const int communicator = random_communicator();
  if (communicator < 0) return;
  const int tag = random(kTags);
  const bool any = chance(20);
  const int from = any ? Communicator::any_source : random_peer();
  for (int burst = chance(5) ? 10 : 1; burst > 0; --burst) {
    if (receives_.size() >= kMaxPendingReceives || log_.receives >= kMaxRecords / 2) return;
    std::size_t capacity = any ? kMaxBytes : likely_bytes(communicator, from, tag);
    const int luck = random(20);
    if (luck == 0)
      capacity -= std::min<std::size_t>(capacity, 1 + random(100));  // too small, as a rule
    else if (luck < 10)
      capacity += random(100);
    else if (luck == 10)
      capacity = kMaxBytes;
    start_receive(communicator, from, tag, capacity);
  }
}

// The length of the message that a receive posted now gets, unless some are cancelled.
std::size_t Rank::likely_bytes(int communicator, int from, int tag) {
  const auto before = std::count_if(receives_.begin(), receives_.end(), [&](const Receive& other) {
    const ReceiveRecord& record = log_.receive[other.record];
    return record.communicator == communicator && record.tag == tag && record.posted_for == from;
  });
  return plan_.message_bytes({communicator, from, rank_, tag},
                             seen_[communicator][from][tag] + before);
}

void Rank::start_receive(int communicator, int from, int tag, std::size_t capacity) {
  if (log_.receives >= kMaxRecords) throw Violation("more receives than can be recorded");
  Receive receive{Buffer(capacity, random(64)), log_.receives, nullptr};
  std::fill_n(receive.buffer.data, std::min(capacity, kGuardBytes), kGuard);
  std::fill_n(receive.buffer.data + capacity - std::min(capacity, kGuardBytes),
              std::min(capacity, kGuardBytes), kGuard);
  log_.receive[log_.receives++] = {
      .communicator = static_cast<std::int8_t>(communicator),
      .tag = static_cast<std::int8_t>(tag),
      .posted_for = static_cast<std::int8_t>(from),
      .from = static_cast<std::int8_t>(from),
      .outcome = Received::pending,
      .has_sequence = false,
      .short_contents = {},
      .sequence = 0,
      .bytes = 0,
  };
  count();
  receive.request = communicators_[communicator]->irecv(receive.buffer.data, capacity, from,
                                                        plan_.tag_value(tag));
  receives_.push_back(std::move(receive));
}

void Rank::look_at_one(bool wait) {
  const std::size_t pending = sends_.size() + receives_.size();
  if (pending == 0) return;
  const std::size_t index = random_() % pending;
  if (index < sends_.size())
    settle_send(index, wait);
  else
    settle_receive(index - sends_.size(), wait);
}

void Rank::drop_one() {
  const std::size_t pending = sends_.size() + receives_.size();
  if (pending == 0) return;
  count();
  const std::size_t index = random_() % pending;
  if (index < sends_.size()) {
    log_.send[sends_[index].record].cancelled = true;
    sends_[index].request.reset();  // before its buffer, which erase() would overwrite first
    sends_.erase(sends_.begin() + index);
  } else {
    const auto receive = receives_.begin() + (index - sends_.size());
    log_.receive[receive->record].outcome = Received::dropped;
    receive->request.reset();
    receive->buffer.expect_intact("a cancelled receive");
    receives_.erase(receive);
  }
}

namespace {

// Whether it is done; false also where the deadline passed. Throws what the request throws.
bool is_over(Request& request, bool wait, std::chrono::milliseconds timeout) {
  if (!wait) return request.test();
  try {
    request.wait(timeout);
    return true;
  } catch (const TimeoutError&) {
    return false;
  }
}

}  // namespace

bool Rank::settle_send(std::size_t index, bool wait) {
  count();
  Send& send = sends_[index];
  try {
    if (!is_over(*send.request, wait, std::chrono::milliseconds(random(3)))) return false;
    const std::size_t sent = send.request->wait();
    if (sent != send.buffer.bytes)
      throw Violation(text("a send of ", send.buffer.bytes, " bytes returned ", sent));
  } catch (const Error& error) {
    expect_failure(send.channel.communicator, error.what());
  }
  send.buffer.expect_intact("a send");
  sends_.erase(sends_.begin() + index);
  return true;
}

bool Rank::settle_receive(std::size_t index, bool wait) {
  count();
  Receive& receive = receives_[index];
  ReceiveRecord& record = log_.receive[receive.record];
  try {
    if (!is_over(*receive.request, wait, std::chrono::milliseconds(random(3)))) return false;
    record.from = static_cast<std::int8_t>(receive.request->peer());
    delivered(receive, receive.request->wait());
  } catch (const PeerError& error) {
    expect_failure(record.communicator, error.what());
  } catch (const AbortedError& error) {
    expect_failure(record.communicator, error.what());
  } catch (const Error& error) {
    record.from = static_cast<std::int8_t>(receive.request->peer());
    refused(receive, error.what());
  }
  receive.buffer.expect_intact("a receive");
  note_end(record);
  receives_.erase(receives_.begin() + index);
  return true;
}

void Rank::delivered(Receive& receive, std::size_t bytes) {
  ReceiveRecord& record = log_.receive[receive.record];
  record.outcome = Received::delivered;
  record.bytes = bytes;
  const Channel channel{record.communicator, record.from, rank_, record.tag};
  const auto expect = [&](bool holds, const std::string& what) {
    if (!holds)
      throw Violation(text("communicator ", channel.communicator, ", from rank ", channel.from,
                           ", tag ", plan_.tag_value(channel.tag), ", message ", record.sequence,
                           " of ", bytes, " bytes: ", what));
  };
  const Buffer& buffer = receive.buffer;
  expect(record.posted_for < 0 || record.posted_for == record.from, "from another rank");
  expect(bytes <= buffer.bytes, "longer than its buffer");
  const std::size_t untouched = std::max(bytes, buffer.bytes - std::min(buffer.bytes, kGuardBytes));
  expect(std::all_of(buffer.data + untouched, buffer.data + buffer.bytes,
                     [](std::byte b) { return b == kGuard; }),
         "the buffer was written behind the message's end");
  if (bytes < 8) {
    std::memcpy(record.short_contents, buffer.data, bytes);
    ++seen_[channel.communicator][channel.from][channel.tag];
    return;
  }
  record.has_sequence = true;
  std::memcpy(&record.sequence, buffer.data, 8);
  expect(record.sequence < kMaxRecords || record.sequence == kEndSequence, "not a message's start");
  expect(bytes == plan_.message_bytes(channel, record.sequence), "of another length than sent");
  const std::uint64_t key = plan_.message_key(channel, record.sequence);
  const std::uint64_t first = testing::pattern_word(key, 0);
  std::memcpy(buffer.data, &first, 8);
  const auto at = testing::difference(buffer.data, bytes, key);
  expect(!at, text("byte ", at.value_or(0), " is not what was sent"));
  if (record.sequence != kEndSequence)
    seen_[channel.communicator][channel.from][channel.tag] = record.sequence + 1;
}

void Rank::refused(Receive& receive, const std::string& what) {
  ReceiveRecord& record = log_.receive[receive.record];
  const Buffer& buffer = receive.buffer;
  unsigned long message_bytes = 0, buffer_bytes = 0;
  const auto lengths = what.find("the message has ");
  if (lengths != std::string::npos &&
      std::sscanf(what.c_str() + lengths, "the message has %lu bytes, the buffer only %lu",
                  &message_bytes, &buffer_bytes) == 2) {
    if (message_bytes <= buffer.bytes || buffer_bytes != buffer.bytes)
      throw Violation(text("a buffer of ", buffer.bytes, " bytes was refused: ", what));
    if (!std::all_of(buffer.data, buffer.data + std::min(buffer.bytes, kGuardBytes),
                     [](std::byte b) { return b == kGuard; }))
      throw Violation("a message that did not fit was written all the same: " + what);
    record.outcome = Received::truncated;
    record.bytes = message_bytes;
    ++seen_[record.communicator][record.from][record.tag];
  } else if (what.find("took the message back") != std::string::npos) {
    record.outcome = Received::taken_back;
  } else {
    throw Violation("an unexpected error: " + what);
  }
}

void Rank::note_end(const ReceiveRecord& record) {
  const bool end = (record.outcome == Received::delivered && record.sequence == kEndSequence) ||
                   (record.outcome == Received::truncated && record.bytes == kEndBytes);
  if (!end) return;
  bool& ended = ended_[record.communicator][record.from][record.tag];
  if (ended) throw Violation("a channel ended twice");
  ended = true;
}

void Rank::expect_failure(int communicator, const std::string& text) {
  const bool on_purpose =
      plan_.kind() != EpochKind::orderly &&
      (text.find("on purpose") != std::string::npos || text.find("left") != std::string::npos ||
       // by a collective that failed there, and aborts next
       text.find("took the message back") != std::string::npos ||
       text.find("closed") != std::string::npos);
  if (!on_purpose) throw Violation("an unexpected error: " + text);
  if (!communicators_[communicator]->failure().empty()) dead_[communicator] = true;
}

void Rank::collective() {
  const int index = step_ / kStepsACollective;
  const int which = index % kCommunicators;
  if (dead_[which]) return;
  count();
  try {
    run_collective(*groups_[which], plan_.collective_seed(index));
  } catch (const Error& error) {
    expect_failure(which, error.what());
    dead_[which] = true;
    // The others may still wait for this rank's part.
    communicators_[which]->abort("a collective failed on purpose");
  }
}

}  // namespace dicomm::oracle
