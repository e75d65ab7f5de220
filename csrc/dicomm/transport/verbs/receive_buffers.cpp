#include "transport/verbs/receive_buffers.h"

#include <algorithm>
#include <cerrno>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

constexpr std::uint32_t kMostShared = 2048;
constexpr std::uint32_t kMorePerPair = 2;
constexpr std::uint32_t kMoreAtOnce = 16;
constexpr std::uint32_t kReturnedAtOnce = 8;

}  // namespace

void GiveBack::operator()(std::byte*) const { to->give_back(number); }

ReceiveBuffers::ReceiveBuffers(std::shared_ptr<Device> device, bool shared)
    : device_(std::move(device)),
      pool_({device_}, kFrontRoom + kSlotBytes),
      most_(shared ? std::min<std::uint32_t>(kMostShared, device_->attributes().max_srq_wr)
                   : kReceives) {
  if (!shared) return;
  ibv::SrqInit init{};
  init.max_wr = most_;
  init.max_sge = 1;
  shared_queue_ = device_->library().create_srq(device_->pd(), &init);
  if (!shared_queue_)
    throw Error(
        text("cannot make a shared receive queue on ", device_->name(), ": ", system_error(errno)));
}

ReceiveBuffers::~ReceiveBuffers() {
  if (shared_queue_) device_->library().destroy_srq(shared_queue_);
}

void ReceiveBuffers::join(QueuePair& pair) {
  const std::lock_guard held(mutex_);
  if (!shared_queue_) pair_ = &pair;
  const std::uint32_t wanted = std::min(most_, kReceives + kMorePerPair * joined_++);
  const auto there = static_cast<std::uint32_t>(buffers_.size());
  if (there < wanted) grow(wanted - there);
  check();
  ++pairs_;
}

void ReceiveBuffers::leave() {
  const std::lock_guard held(mutex_);
  --pairs_;
}

Received ReceiveBuffers::take(std::uint32_t number) {
  const std::lock_guard held(mutex_);
  taken_ = std::max(taken_, buffers_[number].posted_as);
  if (posted_ - taken_ < buffers_.size() / 2 && room() > 0) try {
      grow(std::min(kMoreAtOnce, room()));
    } catch (const std::exception&) {
      most_ = static_cast<std::uint32_t>(buffers_.size());  // memory is short: senders wait
    }
  return {buffers_[number].slot.data + kFrontRoom, {this, number}};
}

void ReceiveBuffers::check() const {
  if (const int error = error_)
    throw RailError(text("its device took no more receive buffers: ", system_error(error)));
}

// How many more could be of use.
std::uint32_t ReceiveBuffers::room() const {
  const std::uint32_t most = std::min(most_, kReceives * pairs_);
  const auto there = static_cast<std::uint32_t>(buffers_.size());
  return most > there ? most - there : 0;
}

void ReceiveBuffers::grow(std::uint32_t count) {
  for (; count > 0; --count) {
    buffers_.push_back({pool_.take()});
    returned_.reserve(buffers_.capacity());  // so that giving back needs no memory
    returned_.push_back(static_cast<std::uint32_t>(buffers_.size() - 1));
  }
  post_returned();
}

void ReceiveBuffers::give_back(std::uint32_t number) {
  const std::lock_guard held(mutex_);
  returned_.push_back(number);
  if (returned_.size() >= kReturnedAtOnce) post_returned();
}

void ReceiveBuffers::post_returned() {
  if (pair_ && pair_->closed()) return;
  ibv::ReceiveRequest requests[kReturnedAtOnce];
  ibv::Piece pieces[kReturnedAtOnce];
  while (!returned_.empty() && error_ == 0) {
    const auto count = std::min<std::size_t>(kReturnedAtOnce, returned_.size());
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t number = returned_[returned_.size() - 1 - i];
      Buffer& buffer = buffers_[number];
      buffer.posted_as = ++posted_;
      pieces[i] = {reinterpret_cast<std::uint64_t>(buffer.slot.data + kFrontRoom), kSlotBytes,
                   buffer.slot.lkey(0)};
      requests[i] = {number, i + 1 < count ? &requests[i + 1] : nullptr, &pieces[i], 1};
    }
    error_ = shared_queue_ ? ibv::post(shared_queue_, requests) : pair_->post(requests);
    returned_.resize(returned_.size() - count);
  }
}

}  // namespace dicomm::verbs
