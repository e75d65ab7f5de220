#include "transport/verbs/link.h"

#include <sys/mman.h>

#include <cerrno>
#include <numeric>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

constexpr std::uint32_t kReceives = kSlots + kSpareSlots;
constexpr std::uint32_t kReturnedAtOnce = 8;

std::vector<Registrar*> registrars(const Rails& rails) {
  std::vector<Registrar*> result;
  for (const auto& device : rails.devices) result.push_back(device.get());
  return result;
}

}  // namespace

SlotMemory::SlotMemory(std::size_t bytes, const Rails& rails) : bytes_(bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(text("no ", bytes, " bytes for message buffers: ", system_error(errno)));
  // Devices write here behind the processor's back: a fork must not move the pages.
  ::madvise(memory, bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(memory);
  registration_ =
      Registration::make({reinterpret_cast<std::uint64_t>(memory), bytes}, registrars(rails));
  for (std::size_t device = 0; device < rails.devices.size(); ++device)
    if (!registration_ || !registration_->on(device)) {
      const int error = errno;
      registration_.reset();
      ::munmap(data_, bytes_);
      throw Error(text(rails.devices[device]->name(), " cannot register ", bytes,
                       " bytes of buffers: ", system_error(error),
                       " (is the limit on locked memory, ulimit -l, too low?)"));
    }
}

SlotMemory::~SlotMemory() {
  registration_.reset();
  ::munmap(data_, bytes_);
}

Link::Link(const Rails& rails, std::size_t rail, const GidEntry* gid)
    : receive_memory_(std::size_t{kReceives} * (kFrontRoom + kSlotBytes), rails),
      pair(rails.rails[rail], rails.settings, {kSendDepth + kReadsAtOnce, kReceives}),
      gid(gid),
      device_index(rails.rails[rail].device_index) {
  std::vector<std::uint32_t> all(kReceives);
  std::iota(all.begin(), all.end(), 0);
  post_receives(all.data(), kReceives);
}

void Link::connect(const RailCard& theirs) {
  peer = theirs;
  pair.connect(theirs, pair.route(theirs, gid));
}

void Link::connect(const RailCard& theirs, const ibv::QpAttributes& route,
                   std::shared_ptr<cm::Id> id) {
  peer = theirs;
  cm_id = std::move(id);
  pair.connect(theirs, route);
}

void Link::give_back(std::uint32_t buffer) {
  if (!up()) return;
  returned_.push_back(buffer);
  if (returned_.size() < kReturnedAtOnce) return;
  post_receives(returned_.data(), kReturnedAtOnce);
  returned_.clear();
}

void Link::post_receives(const std::uint32_t* buffers, std::uint32_t count) {
  std::vector<ibv::ReceiveRequest> requests(count);
  std::vector<ibv::Piece> pieces(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    pieces[i] = {reinterpret_cast<std::uint64_t>(received(buffers[i])), kSlotBytes,
                 receive_memory_.lkey(device_index)};
    requests[i] = {buffers[i], i + 1 < count ? &requests[i + 1] : nullptr, &pieces[i], 1};
  }
  pair.post(requests.data());
}

std::string Link::describe() const {
  return text(pair.rail().describe(), gid ? text(" (", verbs::describe(gid->gid), ")") : "");
}

}  // namespace dicomm::verbs
