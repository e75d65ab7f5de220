// Reads a sysfs tree into a Topology.
#include <algorithm>
#include <array>
#include <regex>
#include <tuple>

#include "core/communicator.h"
#include "core/text.h"
#include "topology/address.h"
#include "topology/sysfs.h"
#include "topology/topology.h"

namespace dicomm {

namespace {

using sysfs::Path;

constexpr std::uint32_t kDisplay = 0x03;
constexpr std::uint32_t kAccelerator = 0x12;
// Whose display controllers no one computes on: ASPEED and Matrox (BMCs), QEMU, Cirrus, Red Hat's
// virtio, VMware and Hyper-V (virtual machines).
constexpr std::array<std::uint32_t, 7> kConsoles{0x1a03, 0x102b, 0x1234, 0x1013,
                                                 0x1af4, 0x15ad, 0x1414};

bool is_chip(const PciDevice& device) {
  const std::uint32_t kind = device.class_code >> 16;
  if (kind == kAccelerator) return true;
  return kind == kDisplay &&
         std::find(kConsoles.begin(), kConsoles.end(), device.vendor) == kConsoles.end();
}

// The part of a real path from the host bridge ("pci0000:17") on; empty: not on PCI.
std::vector<std::string> from_host_bridge(std::vector<std::string> path) {
  static const std::regex host_bridge("pci[0-9a-f]{4,}:[0-9a-f]{2}");
  const auto first = std::find_if(path.begin(), path.end(), [](const std::string& name) {
    return std::regex_match(name, host_bridge);
  });
  return {first, path.end()};
}

// Bytes per second each way, from transfers per second and lanes; 0: not known.
double link_bytes_per_s(const Path& device) {
  const double transfers_per_s =
      sysfs::read_quantity(device / "current_link_speed", "GT/s").value_or(0) * 1e9;
  const auto lanes = sysfs::read_integer(device / "current_link_width").value_or(0);
  if (lanes < 1 || lanes > 32) return 0;  // 63 and 255: nothing is plugged in
  const double coding = transfers_per_s <= 5e9 ? 8.0 / 10 : 128.0 / 130;
  return transfers_per_s / 8 * lanes * coding;
}

PciDevice read_pci_device(const Path& folder, const std::string& address) {
  PciDevice device;
  device.address = address;
  device.class_code = sysfs::read_integer(folder / "class").value_or(0);
  device.vendor = sysfs::read_integer(folder / "vendor").value_or(0);
  device.device = sysfs::read_integer(folder / "device").value_or(0);
  device.numa_node = sysfs::read_integer(folder / "numa_node").value_or(-1);
  device.link_bytes_per_s = link_bytes_per_s(folder);
  device.path = from_host_bridge(sysfs::real_path(folder));
  return device;
}

// A device that does not say its NUMA node is on that of the nearest port above that does.
void inherit_numa_nodes(std::map<std::string, PciDevice>& pci) {
  for (auto& [address, device] : pci)
    for (auto port = device.path.rbegin(); device.numa_node < 0 && port != device.path.rend();
         ++port)
      if (const auto above = pci.find(*port); above != pci.end())
        device.numa_node = above->second.numa_node;
}

std::string network_of(const Path& device, const Path& port) {
  if (const auto name = sysfs::read_line(port / "gid_attrs/ndevs/0")) return *name;
  if (const auto name = sysfs::read_line(device / "parent")) return *name;  // software RDMA
  const auto names = sysfs::entries(device / "device/net");
  return names.empty() ? "" : names.front();
}

Nic read_nic(const Path& device, const std::string& port_name) {
  const Path port = device / "ports" / port_name;
  const auto number = sysfs::parse_integer(port_name);
  if (!number || *number < 1 || *number > 255)
    throw Error(text(port.string(), ": '", port_name, "' is not a port number"));
  Nic nic;
  nic.device = device.filename();
  nic.port = *number;
  const std::string state = sysfs::read_line(port / "state").value_or("unknown");  // "4: ACTIVE"
  const auto colon = state.find(": ");
  nic.state = colon == std::string::npos ? state : state.substr(colon + 2);
  nic.active = nic.state == "ACTIVE";
  nic.link_layer = sysfs::read_line(port / "link_layer").value_or("unknown");
  nic.bytes_per_s = sysfs::read_quantity(port / "rate", "Gb/sec").value_or(0) * 1e9 / 8;
  nic.network = network_of(device, port);
  return nic;
}

// "mlx5_2" before "mlx5_10": by the length of the name, then by its letters.
auto order(const Nic& nic) {
  return std::tuple(nic.pci_address.empty(), nic.pci_address, nic.device.size(), nic.device,
                    nic.port);
}

std::vector<Nic> read_nics(const Path& folder, const std::map<std::string, PciDevice>& pci) {
  std::vector<Nic> nics;
  for (const std::string& name : sysfs::entries(folder)) {
    const Path device = folder / name;
    const auto path = from_host_bridge(sysfs::real_path(device / "device"));
    const auto card = from_host_bridge(sysfs::real_path(device / "device/physfn"));
    for (const std::string& port : sysfs::entries(device / "ports")) {
      nics.push_back(read_nic(device, port));
      if (!path.empty() && pci.contains(path.back())) nics.back().pci_address = path.back();
      if (!card.empty()) nics.back().physical_function = card.back();
    }
  }
  std::sort(nics.begin(), nics.end(),
            [](const Nic& a, const Nic& b) { return order(a) < order(b); });
  return nics;
}

std::vector<NumaNode> read_numa_nodes(const Path& folder) {
  std::vector<NumaNode> nodes;
  const std::vector<int> online = sysfs::read_list(folder / "online");
  for (const int id : online) {
    const Path its = folder / text("node", id);
    NumaNode node{id, sysfs::read_line(its / "cpulist").value_or(""), {}};
    std::istringstream distances(sysfs::read_line(its / "distance").value_or(""));
    int distance = 0;
    for (auto other = online.begin(); other != online.end() && distances >> distance; ++other)
      node.distances[*other] = distance;
    nodes.push_back(std::move(node));
  }
  return nodes;
}

}  // namespace

Topology discover(const Path& sys_root, const std::vector<std::string>& chips) {
  std::error_code unreadable;
  if (!std::filesystem::is_directory(sys_root / "devices", unreadable) &&
      !std::filesystem::is_directory(sys_root / "class", unreadable))
    throw Error(text("'", sys_root.string(), "' is not a sysfs tree: it has no folder 'devices'"));
  Topology topology;
  const Path devices = sys_root / "bus/pci/devices";
  for (const std::string& address : sysfs::entries(devices))
    topology.pci.emplace(address, read_pci_device(devices / address, address));
  inherit_numa_nodes(topology.pci);
  for (const auto& [address, device] : topology.pci)
    if (is_chip(device)) topology.chips.push_back(address);
  for (const std::string& chip : chips) {
    const std::string address = checked_address(topology, chip);
    if (std::find(topology.chips.begin(), topology.chips.end(), address) == topology.chips.end())
      topology.chips.push_back(address);
  }
  std::sort(topology.chips.begin(), topology.chips.end());
  topology.nics = read_nics(sys_root / "class/infiniband", topology.pci);
  topology.numa_nodes = read_numa_nodes(sys_root / "devices/system/node");
  return topology;
}

}  // namespace dicomm
