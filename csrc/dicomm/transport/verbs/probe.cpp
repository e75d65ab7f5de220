#include "transport/verbs/probe.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>

#include "transport/verbs/loop_back.h"

namespace dicomm::verbs {

namespace {

constexpr int kRounds = 3;  // the memory may be written to while it is compared

using Piece = LoopBack::Piece;

// Asks the kernel, which answers instead of crashing: no host may be able to touch the memory.
bool copy_by_host(std::uint64_t address, std::size_t bytes, Piece& into) {
  const iovec local{into.data(), bytes};
  const iovec remote{reinterpret_cast<void*>(address), bytes};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
}

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
  const auto unasked = [&] {
    if (registered.is_chips)
      warn_once(rail->device->name(), "what it writes there cannot be flushed");
    return !registered.is_chips;
  };
  try {
    LoopBack nic(*rail, rails.settings);
    if (!nic.works()) return unasked();
    const auto bytes =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(region.bytes, LoopBack::kMostBytes));
    for (const std::uint64_t address : {region.address, region.address + region.bytes - bytes}) {
      const std::string wrong = examine(nic, address, bytes, registered.rkey);
      if (wrong.empty()) continue;
      warn_once(rail->device->name(), wrong);
      return false;
    }
    return true;
  } catch (const Error&) {  // no such queue pair, or nothing can be posted to it
  }
  return unasked();
}

}  // namespace dicomm::verbs
