#include "transport/verbs/probe.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>

#include "core/stream.h"
#include "core/text.h"
#include "transport/verbs/queue_pair.h"

namespace dicomm::verbs {

namespace {

constexpr std::size_t kPieceBytes = 256;
constexpr std::chrono::seconds kReadTimeout{2};
constexpr int kRounds = 3;  // the memory may be written to while it is compared

using Piece = std::array<std::byte, kPieceBytes>;

// Asks the kernel, which answers instead of crashing: no host may be able to touch the memory.
bool copy_by_host(std::uint64_t address, std::size_t bytes, Piece& into) {
  const iovec local{into.data(), bytes};
  const iovec remote{reinterpret_cast<void*>(address), bytes};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
}

class LoopBack {
 public:
  LoopBack(const Rail& rail, const Settings& settings)
      : device_(*rail.device), pair_(rail, settings, {kRounds * 2 + 1, 1}) {
    const GidEntry* gid = rail.gids.empty() ? nullptr : choose_gid(rail.gids, rail.gids);
    const RailCard card = pair_.card(gid);
    pair_.connect(card, pair_.route(card, gid));
    landing_key_ = device_.enter({address_of(landing_), sizeof landing_});
    if (!landing_key_) throw Error("no memory of the host can be registered");
  }
  ~LoopBack() {
    pair_.destroy();
    if (landing_key_) device_.leave(landing_key_->handle);
  }

  // What the device finds there. "", or why it cannot.
  std::string read(std::uint64_t address, std::uint32_t bytes, std::uint32_t rkey, Piece& found) {
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

  // A read of the host's own memory: whether the device loops back at all.
  bool works() {
    Piece scratch{}, found;
    const auto key = device_.enter({address_of(scratch), sizeof scratch});
    if (!key) return false;
    const bool read_well =
        read(address_of(scratch), sizeof scratch, key->rkey, found).empty() && found == scratch;
    device_.leave(key->handle);
    return read_well;
  }

 private:
  static std::uint64_t address_of(const Piece& piece) {
    return reinterpret_cast<std::uint64_t>(piece.data());
  }

  Device& device_;
  QueuePair pair_;
  alignas(64) Piece landing_{};
  std::optional<Registered> landing_key_;
};

// "", or what is wrong there.
std::string examine(LoopBack& nic, std::uint64_t address, std::uint32_t bytes, std::uint32_t rkey) {
  for (int round = 0; round < kRounds; ++round) {
    Piece seen, found;
    const bool visible = copy_by_host(address, bytes, seen);
    if (const std::string error = nic.read(address, bytes, rkey, found); !error.empty())
      return error;
    if (!visible || std::equal(seen.begin(), seen.begin() + bytes, found.begin())) return "";
  }
  return "it reads other bytes than the host";
}

void warn_once(const std::string& device, const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  std::lock_guard lock(mutex);
  if (warned.insert(device).second)
    std::fprintf(stderr,
                 "dicomm: %s registers declared (chip) memory but cannot reach it (%s): that goes "
                 "through host memory instead\n",
                 device.c_str(), reason.c_str());
}

}  // namespace

bool reaches(const Rails& rails, std::size_t device, const Region& region,
             const Registered& registered) {
  const auto rail = std::find_if(rails.rails.begin(), rails.rails.end(),
                                 [&](const Rail& each) { return each.device_index == device; });
  if (rail == rails.rails.end()) return true;
  try {
    LoopBack nic(*rail, rails.settings);
    if (!nic.works()) return true;
    const auto bytes =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(region.bytes, kPieceBytes));
    for (const std::uint64_t address : {region.address, region.address + region.bytes - bytes}) {
      const std::string wrong = examine(nic, address, bytes, registered.rkey);
      if (wrong.empty()) continue;
      warn_once(rail->device->name(), wrong);
      return false;
    }
  } catch (const Error&) {      // no such queue pair
  } catch (const StreamEnd&) {  // nothing can be posted to it
  }
  return true;
}

}  // namespace dicomm::verbs
