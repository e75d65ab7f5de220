// The orderly end of an epoch: every channel gets a last message, and what is left is received.
#include <algorithm>

#include "collective/collectives.h"
#include "oracle/rank.h"

namespace dicomm::oracle {

using namespace std::chrono_literals;

namespace {

constexpr auto kDrainPatience = 100s;

}  // namespace

// After the first meeting nobody cancels any more, so a channel's end is sure to arrive.
void Rank::drain() {
  for (int i = 0; i < kCommunicators; ++i) {
    barrier(*groups_[i], {groups_[i]->next_tag()});
    count();
  }
  for (int i = 0; i < kCommunicators; ++i)
    for (int to = 0; to < plan_.settings.ranks; ++to)
      for (int tag = 0; to != rank_ && tag < kTags; ++tag)
        start_send({i, rank_, to, tag}, kEndSequence);
  const auto deadline = std::chrono::steady_clock::now() + kDrainPatience;
  while (post_for_missing_ends()) {
    bool progress = false;
    for (std::size_t i = receives_.size(); i-- > 0;) progress |= settle_receive(i, false);
    if (!progress) look_at_one(true);
    if (std::chrono::steady_clock::now() > deadline)
      throw Violation("a message that was sent never arrived");
    if (arena_.failed) throw std::runtime_error("another rank failed");
  }
  drop_surplus();
  for (int i = 0; i < kCommunicators; ++i) {
    barrier(*groups_[i], {groups_[i]->next_tag()});
    count();
  }
  finish_sends();
}

bool Rank::post_for_missing_ends() {
  bool missing = false;
  for (int i = 0; i < kCommunicators; ++i)
    for (int from = 0; from < plan_.settings.ranks; ++from)
      for (int tag = 0; from != rank_ && tag < kTags; ++tag) {
        if (ended_[i][from][tag]) continue;
        missing = true;
        const bool posted =
            std::any_of(receives_.begin(), receives_.end(), [&](const Receive& receive) {
              const ReceiveRecord& record = log_.receive[receive.record];
              return record.communicator == i && record.tag == tag && record.posted_for == from;
            });
        if (!posted) start_receive(i, from, tag, kMaxBytes);
      }
  return missing;
}

// Everything sent was received: what is still posted must get nothing.
void Rank::drop_surplus() {
  for (Receive& receive : receives_) {
    count();
    if (receive.request->test()) throw Violation("a message arrived that nobody sent");
    log_.receive[receive.record].outcome = Received::surplus;
  }
  receives_.clear();
}

void Rank::finish_sends() {
  for (Send& send : sends_) {
    count();
    if (send.request->wait(std::chrono::milliseconds(30s)) != send.buffer.bytes)
      throw Violation("a send returned another length than sent");
    send.buffer.expect_intact("a send");
  }
  sends_.clear();
}

}  // namespace dicomm::oracle
