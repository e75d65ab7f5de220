#include "transport/verbs/loop_back.h"

#include <chrono>
#include <memory>
#include <thread>

namespace dicomm::verbs {

namespace {

constexpr std::chrono::seconds kReadTimeout{2};

}  // namespace

LoopBack::LoopBack(const Rail& rail, const Settings& settings)
    : device_(*rail.device), pair_(rail, settings, {1, 1}) {
  const GidEntry* gid = rail.gids.empty() ? nullptr : choose_gid(rail.gids, rail.gids);
  const RailCard card = pair_.card(gid);
  pair_.connect(card, pair_.route(card, gid));
  landing_key_ = device_.enter({address_of(landing_), sizeof landing_, nullptr});
  if (!landing_key_) throw Error("no memory of the host can be registered");
}

LoopBack::~LoopBack() {
  pair_.destroy();
  if (landing_key_) device_.leave(landing_key_->handle);
}

std::string LoopBack::read(std::uint64_t address, std::uint32_t bytes, std::uint32_t rkey,
                           Piece& found) {
  landing_.fill(std::byte{0xa5});
  ibv::Piece piece{address_of(landing_), bytes, landing_key_->lkey};
  ibv::SendRequest request{};
  request.pieces = &piece;
  request.piece_count = 1;
  request.opcode = ibv::SendOpcode::rdma_read;
  request.flags = ibv::kSignaled;
  request.remote_address = address;
  request.rkey = rkey;
  pair_.post(&request);
  const auto deadline = std::chrono::steady_clock::now() + kReadTimeout;
  ibv::Completion completion;
  while (pair_.poll(&completion, 1) != 1) {
    if (std::chrono::steady_clock::now() > deadline) return "a read of it does not end";
    std::this_thread::yield();
  }
  found = landing_;
  return completion.status == ibv::kSuccess ? ""
                                            : device_.library().wc_status_str(completion.status);
}

bool LoopBack::works() {
  Piece scratch{}, found;
  const auto key = device_.enter({address_of(scratch), sizeof scratch, nullptr});
  if (!key) return false;
  const auto leave = [this](void* handle) { device_.leave(handle); };
  const std::unique_ptr<void, decltype(leave)> registered(key->handle, leave);
  return read(address_of(scratch), sizeof scratch, key->rkey, found).empty() && found == scratch;
}

}  // namespace dicomm::verbs
