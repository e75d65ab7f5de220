// Where a node's chips and NICs sit on its PCIe tree, and which NICs each chip should use
// (paper, section 5: every chip has its own NIC, the nearest, and the load is balanced).
//
// Everything is read from sysfs once; the rest are pure functions of what was read. A file that a
// container hides only makes the picture coarser; nonsense in one is an Error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace dicomm {

struct PciDevice {
  std::string address;           // "0000:1a:00.0"
  std::uint32_t class_code = 0;  // 0xCCSSPP: class, subclass, programming interface
  std::uint32_t vendor = 0;      // PCI ids
  std::uint32_t device = 0;
  std::vector<std::string> path;  // "pci0000:17" (its host bridge), ports, itself; empty: hidden
  int numa_node = -1;             // -1: unknown
  double link_bytes_per_s = 0;    // of its own link, each way; 0: unknown
};

// One port of one RDMA device.
struct Nic {
  std::string device;  // "mlx5_0"
  int port = 1;
  bool active = false;
  std::string state;        // "ACTIVE", "DOWN" ...
  std::string link_layer;   // "InfiniBand" or "Ethernet"
  double bytes_per_s = 0;   // 0: unknown
  std::string network;      // its network interface, "" if none is seen
  std::string pci_address;  // "": not on PCI (software RDMA), so near to no chip, far from none
  std::string physical_function;  // PCI address of the card of which this is a virtual function

  std::string name() const;  // "mlx5_0:1"
};

struct NumaNode {
  int id = 0;
  std::string cpus;              // "0-31,64-95"
  std::map<int, int> distances;  // by node: 10 is itself
};

struct Topology {
  std::map<std::string, PciDevice> pci;  // every PCI function, by address
  std::vector<std::string> chips;        // addresses of the accelerators, in order
  std::vector<Nic> nics;                 // in order of address, then name; idle ones too
  std::vector<NumaNode> numa_nodes;
};

// What lies between a chip and a NIC, nearest first.
enum class Nearness {
  same_switch,  // below one PCIe switch: the data never reaches the CPU
  same_root,    // below one PCIe host bridge
  same_numa,    // below two host bridges of one NUMA node
  across_numa,  // over the link between sockets
  anywhere,     // one of the two has no place on PCI
};
const char* to_string(Nearness nearness);

struct Distance {
  Nearness nearness = Nearness::anywhere;
  int numa_distance = 0;  // the kernel's, when across NUMA nodes and known; else 0
  int hops = 0;           // PCIe links from one to the other, the CPU's inside not counted

  // Hops count below a switch only, where they alone tell paths apart.
  bool nearer_than(const Distance& other) const;
};

// Reads `sys_root`. Accelerators are PCI classes 0x03 (but for the displays of BMCs and virtual
// machines) and 0x12, and the addresses in `chips`. Throws Error on an address that is not there.
Topology discover(const std::filesystem::path& sys_root = "/sys",
                  const std::vector<std::string>& chips = {});

// `chip`: a PCI address in any usual spelling ("1a:00.0", "0000:1A:00.0"), or "" for a chip that
// is not on PCI. Throws Error if the address is not there.
Distance distance(const Topology& topology, const std::string& chip, const Nic& nic);

// The rails of a chip: all equally near active NICs of the nearest class, those of the fastest
// kind only, at most `limit`. The first is the chip's own: chips with the same rails start at
// different ones. Empty when no NIC is active.
std::vector<Nic> nics_for(const Topology& topology, const std::string& chip, std::size_t limit = 8);

// The job's own choice: a comma-separated list of `device[:port]`, in that order; a device
// without a port stands for its active ports. Throws Error on an unknown or inactive one.
std::vector<Nic> nics_named(const Topology& topology, const std::string& list);

}  // namespace dicomm
