// How far a NIC is from a chip.
#include <algorithm>
#include <cctype>
#include <climits>
#include <regex>

#include "core/communicator.h"
#include "core/text.h"
#include "topology/address.h"
#include "topology/topology.h"

namespace dicomm {

namespace {

// What the kernel says of two NUMA nodes; 0: nothing.
int numa_distance(const Topology& topology, int from, int to) {
  for (const NumaNode& node : topology.numa_nodes)
    if (node.id == from)
      if (const auto found = node.distances.find(to); found != node.distances.end())
        return found->second;
  return 0;
}

bool same_numa(const Topology& topology, const PciDevice& a, const PciDevice& b) {
  if (topology.numa_nodes.size() <= 1) return true;  // then the kernel may well say -1
  return a.numa_node >= 0 && a.numa_node == b.numa_node;
}

}  // namespace

const char* to_string(Nearness nearness) {
  switch (nearness) {
    case Nearness::same_switch:
      return "same PCIe switch";
    case Nearness::same_root:
      return "same host bridge";
    case Nearness::same_numa:
      return "same NUMA node";
    case Nearness::across_numa:
      return "across NUMA nodes";
    case Nearness::anywhere:
      break;
  }
  return "anywhere";
}

bool Distance::nearer_than(const Distance& other) const {
  if (nearness != other.nearness) return nearness < other.nearness;
  if (nearness == Nearness::same_switch) return hops < other.hops;
  const auto known = [](int distance) { return distance > 0 ? distance : INT_MAX; };
  return known(numa_distance) < known(other.numa_distance);
}

Distance distance(const Topology& topology, const std::string& chip, const Nic& nic) {
  if (chip.empty()) return {};
  const PciDevice& from = topology.pci.at(checked_address(topology, chip));
  if (nic.pci_address.empty()) return {};
  const PciDevice& to = topology.pci.at(nic.pci_address);
  const bool hidden = from.path.empty() || to.path.empty();
  if (hidden && (from.numa_node < 0 || to.numa_node < 0)) return {};

  const auto [end, _] =
      std::mismatch(from.path.begin(), from.path.end(), to.path.begin(), to.path.end());
  const int shared = end - from.path.begin();
  const int top = std::max(shared, 1);  // without a shared host bridge: through the CPU
  const int hops = hidden ? 0 : (from.path.size() - top) + (to.path.size() - top);
  if (shared > 1) return {Nearness::same_switch, 0, hops};
  if (shared == 1) return {Nearness::same_root, 0, hops};
  if (same_numa(topology, from, to)) return {Nearness::same_numa, 0, hops};
  return {Nearness::across_numa, numa_distance(topology, from.numa_node, to.numa_node), hops};
}

std::string checked_address(const Topology& topology, const std::string& address) {
  static const std::regex pattern(
      "([0-9a-f]{4,8}:)?([0-9a-f]{2}:[0-9a-f]{2}\\.[0-7])");  // domain: bus:device.function
  std::string spelt = address;
  std::transform(spelt.begin(), spelt.end(), spelt.begin(),
                 [](unsigned char letter) { return std::tolower(letter); });
  std::smatch parts;
  if (!std::regex_match(spelt, parts, pattern))
    throw Error(text("chip '", address, "' is not a PCI address such as 0000:1a:00.0"));
  std::string domain = parts[1].matched ? parts[1].str() : "0000:";
  while (domain.size() > 5 && domain.front() == '0') domain.erase(0, 1);  // CUDA writes 8 digits
  spelt = domain + parts[2].str();
  if (topology.pci.contains(spelt)) return spelt;
  std::string there;
  for (const std::string& chip : topology.chips) there += (there.empty() ? "" : ", ") + chip;
  throw Error(text("chip ", spelt, " is not on this node's PCI; its chips are ",
                   there.empty() ? "none" : there));
}

}  // namespace dicomm
