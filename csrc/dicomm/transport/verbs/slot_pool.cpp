#include "transport/verbs/slot_pool.h"

#include <sys/mman.h>

#include <cerrno>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

constexpr std::size_t kBlockSlots = 16;

}  // namespace

class SlotPool::Block {
 public:
  Block(const std::vector<std::shared_ptr<Device>>& devices, std::size_t bytes);  // throws Error
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return data_; }
  const Registration* registration() const { return registration_.get(); }

 private:
  std::byte* data_;
  const std::size_t bytes_;
  std::shared_ptr<Registration> registration_;
};

SlotPool::Block::Block(const std::vector<std::shared_ptr<Device>>& devices, std::size_t bytes)
    : bytes_(bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(text("no ", bytes, " bytes for message buffers: ", system_error(errno)));
  // Devices write here behind the processor's back: a fork must not move the pages.
  ::madvise(memory, bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(memory);
  std::vector<Registrar*> registrars;
  for (const auto& device : devices) registrars.push_back(device.get());
  registration_ = Registration::make({reinterpret_cast<std::uint64_t>(memory), bytes}, registrars);
  for (std::size_t device = 0; device < devices.size(); ++device)
    if (!registration_ || !registration_->on(device)) {
      const int error = errno;
      registration_.reset();
      ::munmap(data_, bytes_);
      throw Error(text(devices[device]->name(), " cannot register ", bytes,
                       " bytes of buffers: ", system_error(error),
                       " (is the limit on locked memory, ulimit -l, too low?)"));
    }
}

SlotPool::Block::~Block() {
  registration_.reset();
  ::munmap(data_, bytes_);
}

SlotPool::SlotPool(std::vector<std::shared_ptr<Device>> devices, std::size_t slot_bytes)
    : devices_(std::move(devices)), slot_bytes_(slot_bytes) {}

SlotPool::~SlotPool() = default;

Slot SlotPool::take() {
  const std::lock_guard held(mutex_);
  if (free_.empty()) grow();
  const Slot slot = free_.back();
  free_.pop_back();
  return slot;
}

void SlotPool::give_back(const Slot& slot) {
  const std::lock_guard held(mutex_);
  free_.push_back(slot);
}

void SlotPool::grow() {
  const Block& block =
      *blocks_.emplace_back(std::make_unique<Block>(devices_, kBlockSlots * slot_bytes_));
  free_.reserve(blocks_.size() * kBlockSlots);  // so that giving back needs no memory
  for (std::size_t i = kBlockSlots; i-- > 0;)
    free_.push_back({block.data() + i * slot_bytes_, block.registration()});
}

}  // namespace dicomm::verbs
