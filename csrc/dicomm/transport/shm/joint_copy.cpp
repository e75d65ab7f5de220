#include "transport/shm/joint_copy.h"

#include "transport/shm/sizes.h"

namespace dicomm {

namespace {

// How many slices one side takes at once, of so many that are left.
std::uint64_t share(std::uint64_t left, std::uint64_t slice_bytes) {
  const std::uint64_t most = std::max<std::uint64_t>(1, shm::kPieceBytes / slice_bytes);
  return std::clamp<std::uint64_t>(left / 3, 1, most);
}

}  // namespace

void JointReceiver::begin(const Pull& pull, std::size_t slice_bytes) {
  open_ = true;
  ended_ = false;
  offer_ = pull.id;
  bytes_ = pull.bytes;
  slice_bytes_ = std::max<std::uint64_t>(slice_bytes, (bytes_ >> JointCopy::kMostSlicesBits) + 1);
  slices_ = static_cast<std::uint32_t>((bytes_ + slice_bytes_ - 1) / slice_bytes_);
  own_ = 0;
  shared_.offer.store(offer_, std::memory_order_relaxed);
  shared_.address.store(reinterpret_cast<std::uint64_t>(pull.data), std::memory_order_relaxed);
  shared_.slice_bytes.store(slice_bytes_, std::memory_order_relaxed);
  shared_.taken.store(JointCopy::word(++turn_, 0), std::memory_order_release);
}

std::optional<Part> JointReceiver::take() {
  if (ended_) return std::nullopt;
  std::uint64_t word = shared_.taken.load(std::memory_order_acquire);
  while (const std::uint32_t slices_left = left(word)) {
    if (JointCopy::turn(word) != turn_) throw StreamEnd{"it wrote nonsense into shared memory"};
    const std::uint64_t slices = share(slices_left, slice_bytes_);
    if (!shared_.taken.compare_exchange_weak(word, word + slices * JointCopy::kFront,
                                             std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    own_ += static_cast<std::uint32_t>(slices);
    const std::uint64_t offset = JointCopy::front(word) * slice_bytes_;
    return Part{offset, static_cast<std::size_t>(std::min(slices * slice_bytes_, bytes_ - offset))};
  }
  return std::nullopt;
}

void JointReceiver::end() {
  if (ended_) return;
  ended_ = true;
  const std::uint64_t word =
      shared_.taken.exchange(JointCopy::word(turn_, JointCopy::kClosed), std::memory_order_acq_rel);
  senders_ = std::min(JointCopy::back(word), slices_);
}

bool JointReceiver::all_through() const {
  return !slices_left() &&
         sender_through() >= (ended_ ? senders_ : slices_ - std::min(own_, slices_));
}

std::uint32_t JointReceiver::sender_through() const {
  const std::uint64_t word = shared_.through.load(std::memory_order_acquire);
  return JointCopy::turn(word) == turn_ ? JointCopy::count(word) & ~JointCopy::kFailed : 0;
}

bool JointReceiver::sender_failed() const {
  const std::uint64_t word = shared_.through.load(std::memory_order_acquire);
  return JointCopy::turn(word) == turn_ && (JointCopy::count(word) & JointCopy::kFailed) != 0;
}

std::optional<JointSender::Found> JointSender::look(const Buffers& buffers) const {
  const std::uint64_t word = shared_.taken.load(std::memory_order_acquire);
  const std::uint32_t turn = JointCopy::turn(word);
  if (turn == 0 || JointCopy::count(word) == JointCopy::kClosed) return std::nullopt;
  const auto buffer = buffers.find(shared_.offer.load(std::memory_order_relaxed));
  const std::uint64_t address = shared_.address.load(std::memory_order_relaxed);
  const std::uint64_t slice_bytes = shared_.slice_bytes.load(std::memory_order_relaxed);
  if (buffer == buffers.end() || slice_bytes == 0) return std::nullopt;
  const auto& [data, bytes] = buffer->second;
  const std::uint64_t last = (bytes - 1) / slice_bytes;
  const std::uint64_t taken = JointCopy::front(word) + JointCopy::back(word);
  if (taken > last) return std::nullopt;
  const std::uint64_t slices = share(last - taken + 1, slice_bytes);
  const std::uint64_t offset = (last - JointCopy::back(word) - slices + 1) * slice_bytes;
  return Found{word,
               {turn, data + offset, address + offset,
                static_cast<std::size_t>(std::min(slices * slice_bytes, bytes - offset)),
                static_cast<std::uint32_t>(slices)}};
}

std::optional<JointSender::Task> JointSender::take(const Buffers& buffers) {
  while (auto found = look(buffers))
    // While the word is the same, so is the turn: what was read with it holds.
    if (shared_.taken.compare_exchange_weak(found->word,
                                            found->word + found->task.slices * JointCopy::kBack,
                                            std::memory_order_acq_rel, std::memory_order_relaxed))
      return found->task;
  return std::nullopt;
}

bool JointSender::goes_on(const Task& task) const {
  const std::uint64_t word = shared_.taken.load(std::memory_order_acquire);
  return JointCopy::turn(word) == task.turn && JointCopy::count(word) != JointCopy::kClosed;
}

void JointSender::through(const Task& task, bool failed) {
  if (task.turn != turn_) turn_ = task.turn, through_ = 0, failed_ = false;
  through_ += task.slices;
  failed_ |= failed;
  shared_.through.store(JointCopy::word(turn_, through_ | (failed_ ? JointCopy::kFailed : 0)),
                        std::memory_order_release);
}

}  // namespace dicomm
