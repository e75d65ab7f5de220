// The RDMA devices of this process, and the rails a communicator has on them.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/fork.h"
#include "transport/verbs/cm_library.h"
#include "transport/verbs/gids.h"
#include "transport/verbs/library.h"
#include "transport/verbs/memory.h"
#include "transport/verbs/settings.h"

namespace dicomm::verbs {

class Device final : public Registrar {
 public:
  Device(std::shared_ptr<const ibv::Library> library, ibv::Device* device);  // throws Error
  ~Device() override;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  std::optional<Registered> enter(const Region& region) override;
  void leave(void* handle) override;

  const ibv::Library& library() const { return *library_; }
  const std::string& name() const { return name_; }
  ibv::Context* context() const { return context_; }
  ibv::Pd* pd() const { return pd_; }
  const ibv::DeviceAttributes& attributes() const { return attributes_; }

 private:
  std::shared_ptr<const ibv::Library> library_;
  std::string name_;
  ibv::Context* context_ = nullptr;
  std::optional<ClosedInChildren> commands_, events_;
  ibv::Pd* pd_ = nullptr;
  ibv::DeviceAttributes attributes_{};
};

// One port that carries a share of the messages.
struct Rail {
  std::shared_ptr<Device> device;
  std::size_t device_index = 0;  // in Rails::devices
  int port = 1;
  ibv::PortAttributes attributes{};
  std::vector<GidEntry> gids;

  std::string describe() const;  // "mlx5_0:1"
};

class LoopBack;
class ReceiveBuffers;
class SlotPool;

struct Rails {
  Rails();
  ~Rails();

  Settings settings;
  std::vector<std::shared_ptr<Device>> devices;
  std::vector<Rail> rails;
  std::unique_ptr<MemoryCache> memory;

  std::shared_ptr<const cm::Library> cm;  // null: rdma_cm is not to be used
  std::atomic<unsigned> cm_failed{0};     // a bit each rail, where it was tried in vain

  std::map<const Rail*, std::unique_ptr<LoopBack>> loop_backs;  // where one was needed

  // What a device wrote to a chip's memory may be on its way there still when the device says that
  // it has: a read by the same device comes behind it. Waits for one over a rail of the device.
  // Throws Error.
  void flush(const Rail& rail, std::uint64_t address, std::uint32_t rkey);
  std::unique_ptr<SlotPool> send_slots;

  // `memory` and `send_slots`, once the devices and rails are there.
  void make_memory();
  // For a queue pair on that device. From any thread. Throws Error.
  std::shared_ptr<ReceiveBuffers> receive_buffers(std::size_t device);
  std::vector<PublishedRail> published() const;
  // How to connect queue pairs from that address of a rail (null: InfiniBand, by LID).
  Connect connect(const GidEntry* gid) const;

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::shared_ptr<ReceiveBuffers>> shared_receives_;  // by device
};

// Whether the kernel knows any RDMA device.
bool devices_exist();

// Opens the devices of the settings' rails, else those nearest to the chip (a PCI address, or
// empty). Throws Error where there is no library or no usable device.
std::shared_ptr<Rails> open_rails(const Settings& settings, const std::string& chip);

}  // namespace dicomm::verbs
