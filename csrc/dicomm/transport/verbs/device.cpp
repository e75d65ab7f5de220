#include "transport/verbs/device.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/host.h"
#include "core/text.h"
#include "topology/topology.h"
#include "transport/verbs/loop_back.h"
#include "transport/verbs/probe.h"
#include "transport/verbs/receive_buffers.h"
#include "transport/verbs/slot_pool.h"
#include "transport/verbs/wire.h"

namespace dicomm::verbs {

Device::Device(std::shared_ptr<const ibv::Library> library, ibv::Device* device)
    : library_(std::move(library)), name_(library_->get_device_name(device)) {
  context_ = library_->open_device(device);
  if (!context_) throw Error(text("cannot open ", name_, ": ", system_error(errno)));
  pd_ = library_->alloc_pd(context_);
  if (!pd_ || library_->query_device(context_, &attributes_) != 0) {
    const int error = errno;
    if (pd_) library_->dealloc_pd(pd_);
    library_->close_device(context_);
    throw Error(text("cannot use ", name_, ": ", system_error(error)));
  }
  if (context_->command_fd >= 0) commands_.emplace(context_->command_fd);
  if (context_->async_fd >= 0) events_.emplace(context_->async_fd);
}

Device::~Device() {
  commands_.reset();
  events_.reset();
  library_->dealloc_pd(pd_);
  library_->close_device(context_);
}

std::optional<Registered> Device::enter(const Region& region) {
  constexpr int access = ibv::kLocalWrite | ibv::kRemoteWrite | ibv::kRemoteRead;
  ibv::MemoryRegion* entered = nullptr;
  const auto dmabuf =
      region.export_dmabuf ? region.export_dmabuf(region.address, region.bytes) : std::nullopt;
  if (dmabuf && library_->reg_dmabuf_mr)
    entered = library_->reg_dmabuf_mr(pd_, dmabuf->offset_bytes, region.bytes, region.address,
                                      dmabuf->fd.get(), access);
  // Where dmabuf is not to be had, the kernel may know the chip as peer memory.
  if (!entered)
    entered = library_->reg_mr(pd_, reinterpret_cast<void*>(region.address), region.bytes, access);
  if (!entered) return std::nullopt;
  const bool is_chips =
      dmabuf || (region.export_dmabuf && !host_can_read(reinterpret_cast<void*>(region.address)));
  return Registered{entered, entered->lkey, entered->rkey, is_chips};
}

void Device::leave(void* handle) { library_->dereg_mr(static_cast<ibv::MemoryRegion*>(handle)); }

namespace {

bool can_use_cm(const Rail& rail) {
  return std::any_of(rail.gids.begin(), rail.gids.end(), is_ip_address);
}

// Optional unless it is asked for.
std::shared_ptr<const cm::Library> load_cm(const Settings& settings) {
  if (settings.connect == Connect::bootstrap) return nullptr;
  try {
    return cm::Library::load(settings.rdmacm_library);
  } catch (const Error& error) {
    if (settings.connect == Connect::cm)
      throw Error(text("connect 'cm' was asked for: ", error.what()));
    if (settings.rdmacm_library != Settings().rdmacm_library)
      std::fprintf(stderr, "dicomm: rdma_cm is not used: %s\n", error.what());
    return nullptr;
  }
}

}  // namespace

std::string Rail::describe() const { return text(device->name(), ":", port); }

std::vector<PublishedRail> Rails::published() const {
  std::vector<PublishedRail> result;
  for (const Rail& rail : rails)
    result.push_back({rail.attributes.link_layer, rail.gids,
                      cm && can_use_cm(rail) ? settings.connect : Connect::bootstrap});
  return result;
}

Rails::Rails() = default;
Rails::~Rails() = default;

void Rails::make_memory() {
  std::vector<Registrar*> registrars;
  for (const auto& device : devices) registrars.push_back(device.get());
  memory = std::make_unique<MemoryCache>(
      std::move(registrars),
      [this](std::size_t device, const Region& region, const Registered& registered) {
        return reaches(*this, device, region, registered);
      });
  send_slots = std::make_unique<SlotPool>(devices, kSlotBytes);
}

std::shared_ptr<ReceiveBuffers> Rails::receive_buffers(std::size_t device) {
  const auto& receiver = devices[device];
  const ibv::DeviceAttributes& can = receiver->attributes();
  if (can.max_srq <= 0 || can.max_srq_wr < static_cast<int>(kReceives))
    return std::make_shared<ReceiveBuffers>(receiver, false);
  const std::lock_guard held(mutex_);
  auto& shared = shared_receives_[device];
  if (!shared) shared = std::make_shared<ReceiveBuffers>(receiver, true);
  return shared;
}

// A queue pair that failed is not used again.
void Rails::flush(const Rail& rail, std::uint64_t address, std::uint32_t rkey) {
  auto loop_back = std::move(loop_backs[&rail]);
  if (!loop_back) loop_back = std::make_unique<LoopBack>(rail, settings);
  LoopBack::Piece read;
  const std::string wrong = loop_back->read(address, 1, rkey, read);
  if (!wrong.empty())
    throw Error(text(rail.describe(), " cannot flush what it wrote to a chip: ", wrong));
  loop_backs[&rail] = std::move(loop_back);
}

Connect Rails::connect(const GidEntry* gid) const {
  return cm && gid && is_ip_address(*gid) ? settings.connect : Connect::bootstrap;
}

namespace {

std::vector<Nic> chosen_nics(const Settings& settings, const std::string& chip) {
  const Topology topology = discover();
  return settings.nics.empty() ? nics_for(topology, chip, kMaxRails)
                               : nics_named(topology, settings.nics);
}

class DeviceList {
 public:
  explicit DeviceList(const ibv::Library& library)
      : library_(library), devices_(library.get_device_list(&count_)) {}
  ~DeviceList() {
    if (devices_) library_.free_device_list(devices_);
  }

  ibv::Device* named(const std::string& name) const {
    for (int i = 0; i < count_; ++i)
      if (name == library_.get_device_name(devices_[i])) return devices_[i];
    return nullptr;
  }

 private:
  const ibv::Library& library_;
  int count_ = 0;
  ibv::Device** devices_;
};

std::size_t opened(Rails& rails, const std::shared_ptr<const ibv::Library>& library,
                   const DeviceList& list, const std::string& name) {
  for (std::size_t i = 0; i < rails.devices.size(); ++i)
    if (rails.devices[i]->name() == name) return i;
  ibv::Device* device = list.named(name);
  if (!device) throw Error(text("libibverbs does not see ", name, ": is its provider installed?"));
  rails.devices.push_back(std::make_shared<Device>(library, device));
  return rails.devices.size() - 1;
}

}  // namespace

bool devices_exist() {
  std::error_code missing;
  return !std::filesystem::is_empty("/sys/class/infiniband", missing) && !missing;
}

std::shared_ptr<Rails> open_rails(const Settings& settings, const std::string& chip) {
  const auto library = ibv::Library::load(settings.ibverbs_library);
  const DeviceList list(*library);
  auto rails = std::make_shared<Rails>();
  rails->settings = settings;
  for (const Nic& nic : chosen_nics(settings, chip)) {
    if (rails->rails.size() == kMaxRails) break;
    Rail rail;
    rail.device_index = opened(*rails, library, list, nic.device);
    rail.device = rails->devices[rail.device_index];
    rail.port = nic.port;
    if (library->query_port(rail.device->context(), nic.port, &rail.attributes) != 0)
      throw Error(text("cannot query ", rail.describe(), ": ", system_error(errno)));
    if (rail.attributes.state != ibv::PortState::active) continue;
    rail.gids = read_gids("/sys", nic.device, nic.port);
    if (settings.gid_index)
      std::erase_if(rail.gids,
                    [&](const GidEntry& entry) { return entry.index != *settings.gid_index; });
    if (rail.attributes.link_layer == ibv::kEthernet && rail.gids.empty())
      throw Error(text(rail.describe(), " has no GID",
                       settings.gid_index ? text(" of index ", *settings.gid_index) : ""));
    rails->rails.push_back(std::move(rail));
  }
  if (rails->rails.empty()) throw Error("no RDMA device here has an active port");
  rails->cm = load_cm(settings);
  for (const Rail& rail : rails->rails)
    if (settings.connect == Connect::cm && !can_use_cm(rail))
      throw Error(text("connect 'cm' was asked for, but ", rail.describe(),
                       " has no RoCE v2 GID with an IP address"));
  rails->make_memory();
  return rails;
}

}  // namespace dicomm::verbs
