// Which NICs a chip uses.
#include <algorithm>
#include <sstream>

#include "core/communicator.h"
#include "core/text.h"
#include "topology/address.h"
#include "topology/sysfs.h"
#include "topology/topology.h"

namespace dicomm {

namespace {

// All equally near active NICs of the nearest class, in order; alike, because a message striped
// over unlike ones would wait for the slowest.
struct Rails {
  std::string chip;
  Distance distance;
  std::vector<Nic> nics;
};

// A virtual function of a card that is used itself brings no wire of its own.
bool is_doubled(const Topology& topology, const Nic& nic) {
  return !nic.physical_function.empty() &&
         std::any_of(topology.nics.begin(), topology.nics.end(), [&](const Nic& card) {
           return card.active && card.pci_address == nic.physical_function;
         });
}

Rails rails_of(const Topology& topology, const std::string& chip) {
  Rails rails{chip, {}, {}};
  for (const Nic& nic : topology.nics) {
    if (!nic.active || is_doubled(topology, nic)) continue;
    const Distance its = distance(topology, chip, nic);
    if (!rails.nics.empty() && rails.distance.nearer_than(its)) continue;
    if (rails.nics.empty() || its.nearer_than(rails.distance)) {
      rails.distance = its;
      rails.nics.clear();
    }
    rails.nics.push_back(nic);
  }
  if (rails.nics.empty()) return rails;
  const Nic fastest =
      *std::max_element(rails.nics.begin(), rails.nics.end(),
                        [](const Nic& a, const Nic& b) { return a.bytes_per_s < b.bytes_per_s; });
  std::erase_if(rails.nics, [&](const Nic& nic) {
    return nic.bytes_per_s != fastest.bytes_per_s || nic.link_layer != fastest.link_layer;
  });
  return rails;
}

// Turns every chip's rails so that its own NIC, the least taken of them, comes first. The chips
// with the nearest NICs choose first: who has no near one then takes what they left.
void deal(std::vector<Rails>& chips) {
  std::stable_sort(chips.begin(), chips.end(), [](const Rails& a, const Rails& b) {
    return a.distance.nearer_than(b.distance);
  });
  std::map<std::string, int> users;
  for (Rails& rails : chips) {
    const auto own = std::min_element(
        rails.nics.begin(), rails.nics.end(),
        [&](const Nic& a, const Nic& b) { return users[a.name()] < users[b.name()]; });
    if (own == rails.nics.end()) continue;
    ++users[own->name()];
    std::rotate(rails.nics.begin(), own, rails.nics.end());
  }
}

std::string device_names(const Topology& topology) {
  std::string names;
  for (const Nic& nic : topology.nics) names += (names.empty() ? "" : ", ") + nic.name();
  return names.empty() ? "none" : names;
}

// One entry of nics_named's list.
std::vector<Nic> named(const Topology& topology, const std::string& entry) {
  const auto colon = entry.find(':');
  const std::string device = entry.substr(0, colon);
  std::optional<std::int64_t> port;
  if (colon != std::string::npos) {
    port = sysfs::parse_integer(entry.substr(colon + 1));
    if (!port) throw Error(text("NIC '", entry, "': expected device or device:port"));
  }
  std::vector<Nic> found;
  std::string idle;
  for (const Nic& nic : topology.nics) {
    if (nic.device != device || (port && nic.port != *port)) continue;
    if (nic.active)
      found.push_back(nic);
    else
      idle = text(nic.name(), " is ", nic.state);
  }
  if (!found.empty()) return found;
  if (!idle.empty()) throw Error(text("NIC '", entry, "' cannot be used: ", idle));
  throw Error(text("NIC '", entry, "' is not on this node; its NICs are ", device_names(topology)));
}

}  // namespace

std::string Nic::name() const { return text(device, ":", port); }

std::vector<Nic> nics_for(const Topology& topology, const std::string& chip, std::size_t limit) {
  const std::string address = chip.empty() ? chip : checked_address(topology, chip);
  std::vector<Rails> chips;
  for (const std::string& other : topology.chips) chips.push_back(rails_of(topology, other));
  if (std::find(topology.chips.begin(), topology.chips.end(), address) == topology.chips.end())
    chips.push_back(rails_of(topology, address));
  deal(chips);
  auto nics = std::find_if(chips.begin(), chips.end(), [&](const Rails& rails) {
                return rails.chip == address;
              })->nics;
  if (nics.size() > limit) nics.resize(limit);
  return nics;
}

std::vector<Nic> nics_named(const Topology& topology, const std::string& list) {
  std::vector<Nic> nics;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    std::erase(entry, ' ');
    for (Nic& nic : named(topology, entry)) {
      const auto twice = std::find_if(nics.begin(), nics.end(),
                                      [&](const Nic& other) { return other.name() == nic.name(); });
      if (twice != nics.end())
        throw Error(text("NIC ", nic.name(), " is named twice in '", list, "'"));
      nics.push_back(std::move(nic));
    }
  }
  if (nics.empty()) throw Error("the list of NICs is empty; expected device[:port],...");
  return nics;
}

}  // namespace dicomm
