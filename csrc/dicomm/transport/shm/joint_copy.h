// A long message that both of its ends copy, from the sender's buffer straight into the receiver's:
// whoever has a core free takes the next slices, the receiver from the front and the sender from
// the back, so that the same buffers find the same halves in the same core's cache the next time. A
// part is a third of what is left: many slices at first, and single ones at the end, so that
// neither waits long for the other's last part, whoever began first.
//
// The receiver opens a turn for a message, and may end it early: then nobody takes slices any more,
// and once the sender is through with those it took, nobody writes to the receiver's buffer. The
// sender looks once more whether the turn goes on right before it writes. It takes and copies a
// part under its communicator's mutex, so that its buffer stays until then; if its process dies,
// the kernel ends its copy before it closes the socket, which the receiver waits for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>

#include "core/stream.h"

namespace dicomm {

// In shared memory. Neither end trusts it with more than its own buffer's bounds.
struct JointCopy {
  // The receiver's, of the turn.
  alignas(64) std::atomic<std::uint64_t> offer;
  std::atomic<std::uint64_t> address;
  std::atomic<std::uint64_t> slice_bytes;
  // The turn in the upper half, as in the next; how many slices the receiver has taken from the
  // front, in 16 bits, and the sender from the back.
  alignas(64) std::atomic<std::uint64_t> taken;
  // The sender's: with how many it is through, and whether it failed to copy one.
  alignas(64) std::atomic<std::uint64_t> through;

  static constexpr std::uint32_t kClosed = 0xffffffff;
  static constexpr std::uint64_t kFront = 1 << 16, kBack = 1;  // one more slice
  static constexpr unsigned kMostSlicesBits = 15;
  static constexpr std::uint32_t kFailed = 0x80000000;

  static std::uint64_t word(std::uint32_t turn, std::uint32_t count) {
    return std::uint64_t{turn} << 32 | count;
  }
  static std::uint32_t turn(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
  static std::uint32_t count(std::uint64_t word) { return static_cast<std::uint32_t>(word); }
  static std::uint32_t front(std::uint64_t word) { return count(word) >> 16; }
  static std::uint32_t back(std::uint64_t word) { return count(word) & 0xffff; }
};

// Some slices of a message, which one side copies at once.
struct Part {
  std::uint64_t offset;
  std::size_t bytes;
};

class JointReceiver {
 public:
  explicit JointReceiver(JointCopy& shared) : shared_(shared) {}

  void begin(const Pull& pull, std::size_t slice_bytes);
  bool open() const { return open_; }
  std::uint64_t offer() const { return offer_; }
  // This side copies it at once. Nothing: all are taken, or the turn was ended. Throws StreamEnd.
  std::optional<Part> take();
  // Nobody takes slices any more.
  void end();
  // Whether all slices are taken, or the turn was ended, and the sender is through with its own.
  bool all_through() const;
  bool only_sender_at_work() const { return open_ && !slices_left() && !all_through(); }
  bool sender_failed() const;
  // The message is done with.
  void leave() { end(), open_ = false; }

 private:
  bool slices_left() const {
    return !ended_ && left(shared_.taken.load(std::memory_order_acquire)) > 0;
  }
  std::uint32_t left(std::uint64_t word) const {
    return slices_ - std::min(slices_, JointCopy::front(word) + JointCopy::back(word));
  }
  std::uint32_t sender_through() const;

  JointCopy& shared_;
  bool open_ = false, ended_ = false;
  std::uint32_t turn_ = 0;
  std::uint64_t offer_ = 0, bytes_ = 0, slice_bytes_ = 0;
  std::uint32_t slices_ = 0;
  std::uint32_t own_ = 0;      // taken, as the next
  std::uint32_t senders_ = 0;  // once the turn was ended
};

class JointSender {
 public:
  struct Buffer {
    const std::byte* data;
    std::uint64_t bytes;
  };
  struct Task {
    std::uint32_t turn;
    const std::byte* from;
    std::uint64_t to;  // in the receiver's memory
    std::size_t bytes;
    std::uint32_t slices;
  };
  using Buffers = std::unordered_map<std::uint64_t, Buffer>;  // by offer

  explicit JointSender(JointCopy& shared) : shared_(shared) {}

  bool slices_left(const Buffers& buffers) const { return look(buffers).has_value(); }
  // A part of the receiver's turn, if that is for one of these buffers.
  std::optional<Task> take(const Buffers& buffers);
  bool goes_on(const Task& task) const;
  // It copied the part, or need not any more; or it could not.
  void through(const Task& task, bool failed);

 private:
  struct Found {
    std::uint64_t word;
    Task task;
  };
  std::optional<Found> look(const Buffers& buffers) const;

  JointCopy& shared_;
  std::uint32_t turn_ = 0, through_ = 0;
  bool failed_ = false;
};

}  // namespace dicomm
