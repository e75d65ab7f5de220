// Which GID of a port speaks to which GID of a peer's: pure functions, and the port's table in
// sysfs.
//
// A RoCE port has a GID per address and per version of RoCE, so a port with three addresses has
// six or more, and a wrong pair just drops packets.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "transport/verbs/abi.h"
#include "transport/verbs/settings.h"

namespace dicomm::verbs {

struct GidEntry {
  ibv::Gid gid{};
  bool roce_v2 = false;
  int index = 0;
  // Of the netdev's address, where it is known: who shares these bits needs no router.
  int prefix_bits = 0;
};

// What a rank tells of a rail before it is connected.
struct PublishedRail {
  std::uint8_t link_layer = ibv::kUnspecified;
  std::vector<GidEntry> gids;  // gid and roce_v2 only
  Connect connect = Connect::bootstrap;
};

bool is_ipv4(const ibv::Gid& gid);        // ::ffff:a.b.c.d
bool is_link_local(const ibv::Gid& gid);  // fe80::
// Whether rdma_cm can be told of it: RoCE v2, at an address with a meaning beyond the link.
bool is_ip_address(const GidEntry& entry);
std::string describe(const ibv::Gid& gid);

// The entry of `mine` that reaches the peer best, null if none can. In this order: RoCE v2 with
// IPv4 in one subnet, with IPv4 through a router, with IPv6, within the link; RoCE v1.
const GidEntry* choose_gid(const std::vector<GidEntry>& mine, const std::vector<GidEntry>& theirs);

// Entries of /sys/class/infiniband/DEVICE/ports/PORT that are in use.
std::vector<GidEntry> read_gids(const std::filesystem::path& sys_root, const std::string& device,
                                int port);

// "1;2,cm,v2:::ffff:10.1.0.1,...": the count, then each rail; no spaces. decode throws Error.
std::string encode(const std::vector<PublishedRail>& rails);
std::vector<PublishedRail> decode_rails(const std::string& word);

}  // namespace dicomm::verbs
