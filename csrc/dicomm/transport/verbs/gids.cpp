#include "transport/verbs/gids.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "core/communicator.h"
#include "core/text.h"
#include "transport/verbs/wire.h"

namespace dicomm::verbs {

namespace {

constexpr std::size_t kMaxGids = 16;
constexpr int kGidTableRows = 256;
constexpr const char *kCm = "cm", *kCmOnly = "cm-only";

std::string first_line(const std::filesystem::path& file) {
  std::string line;
  std::getline(std::ifstream(file) >> std::ws, line);
  return line;
}

bool share_bits(const ibv::Gid& a, const ibv::Gid& b, int bits) {
  for (int at = 0; at < bits; ++at)
    if ((a[at / 8] ^ b[at / 8]) & (0x80 >> at % 8)) return false;
  return true;
}

// 0: they do not speak to each other.
int affinity(const GidEntry& mine, const GidEntry& theirs) {
  if (mine.roce_v2 != theirs.roce_v2) return 0;
  if (is_ipv4(mine.gid) != is_ipv4(theirs.gid)) return 0;
  if (is_link_local(mine.gid) != is_link_local(theirs.gid)) return 0;
  const bool near = mine.prefix_bits > 0 && share_bits(mine.gid, theirs.gid, mine.prefix_bits);
  if (!mine.roce_v2) return near ? 2 : 1;
  if (is_link_local(mine.gid)) return 3;
  if (is_ipv4(mine.gid)) return near ? 7 : 6;
  return near ? 5 : 4;
}

ibv::Gid parse_gid(const std::string& words) {
  ibv::Gid gid{};
  if (::inet_pton(AF_INET6, words.c_str(), gid.data()) != 1) gid = {};
  return gid;
}

using Addresses = std::unique_ptr<ifaddrs, void (*)(ifaddrs*)>;

Addresses host_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) first = nullptr;
  return {first, [](ifaddrs* addresses) {
            if (addresses) ::freeifaddrs(addresses);
          }};
}

int bits_set(const void* bytes, std::size_t count) {
  int bits = 0;
  for (std::size_t i = 0; i < count; ++i)
    bits += std::popcount(static_cast<const std::uint8_t*>(bytes)[i]);
  return bits;
}

// 0 where no interface has the address.
int prefix_bits(const ibv::Gid& gid, const ifaddrs* addresses) {
  for (const ifaddrs* at = addresses; at; at = at->ifa_next) {
    if (!at->ifa_addr || !at->ifa_netmask) continue;
    if (at->ifa_addr->sa_family == AF_INET && is_ipv4(gid)) {
      const auto& address = reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr;
      const auto& mask = reinterpret_cast<const sockaddr_in*>(at->ifa_netmask)->sin_addr;
      if (std::memcmp(&address, gid.data() + 12, 4) == 0) return 96 + bits_set(&mask, 4);
    } else if (at->ifa_addr->sa_family == AF_INET6) {
      const auto& address = reinterpret_cast<const sockaddr_in6*>(at->ifa_addr)->sin6_addr;
      const auto& mask = reinterpret_cast<const sockaddr_in6*>(at->ifa_netmask)->sin6_addr;
      if (std::memcmp(&address, gid.data(), 16) == 0) return bits_set(&mask, 16);
    }
  }
  return 0;
}

GidEntry decode_gid(const std::string& word) {
  const std::size_t colon = word.find(':');
  GidEntry entry;
  entry.roce_v2 = word.substr(0, colon) == "v2";
  entry.gid = parse_gid(colon == std::string::npos ? "" : word.substr(colon + 1));
  return entry;
}

}  // namespace

bool is_ipv4(const ibv::Gid& gid) {
  static constexpr std::uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.data(), prefix, sizeof prefix) == 0;
}

bool is_link_local(const ibv::Gid& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

bool is_ip_address(const GidEntry& entry) { return entry.roce_v2 && !is_link_local(entry.gid); }

std::string describe(const ibv::Gid& gid) {
  char words[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid))
    ::inet_ntop(AF_INET, gid.data() + 12, words, sizeof words);
  else
    ::inet_ntop(AF_INET6, gid.data(), words, sizeof words);
  return words;
}

const GidEntry* choose_gid(const std::vector<GidEntry>& mine, const std::vector<GidEntry>& theirs) {
  const GidEntry* best = nullptr;
  int best_affinity = 0;
  for (const GidEntry& entry : mine)
    for (const GidEntry& other : theirs)
      if (const int found = affinity(entry, other); found > best_affinity) {
        best = &entry;
        best_affinity = found;
      }
  return best;
}

std::vector<GidEntry> read_gids(const std::filesystem::path& sys_root, const std::string& device,
                                int port) {
  const auto folder = sys_root / "class" / "infiniband" / device / "ports" / std::to_string(port);
  const Addresses addresses = host_addresses();
  std::vector<GidEntry> entries;
  for (int index = 0; index < kGidTableRows && entries.size() < kMaxGids; ++index) {
    const auto file = folder / "gids" / std::to_string(index);
    std::error_code unreadable;
    if (!std::filesystem::exists(file, unreadable)) break;
    GidEntry entry{parse_gid(first_line(file))};
    if (entry.gid == ibv::Gid{}) continue;
    entry.index = index;
    entry.roce_v2 = first_line(folder / "gid_attrs" / "types" / std::to_string(index)) == "RoCE v2";
    entry.prefix_bits = prefix_bits(entry.gid, addresses.get());
    entries.push_back(entry);
  }
  return entries;
}

std::string encode(const std::vector<PublishedRail>& rails) {
  std::ostringstream word;
  word << rails.size();
  for (const PublishedRail& rail : rails) {
    word << ';' << static_cast<int>(rail.link_layer);
    if (rail.connect == Connect::automatic) word << ',' << kCm;
    if (rail.connect == Connect::cm) word << ',' << kCmOnly;
    for (const GidEntry& entry : rail.gids) {
      char words[INET6_ADDRSTRLEN] = "";
      ::inet_ntop(AF_INET6, entry.gid.data(), words, sizeof words);
      word << ',' << (entry.roce_v2 ? "v2:" : "v1:") << words;
    }
  }
  return word.str();
}

std::vector<PublishedRail> decode_rails(const std::string& word) {
  std::istringstream parts(word);
  std::string part;
  std::getline(parts, part, ';');
  std::vector<PublishedRail> rails;
  const std::string count = part;
  while (std::getline(parts, part, ';') && rails.size() <= std::size_t{kMaxRails}) {
    std::istringstream fields(part);
    std::string field;
    PublishedRail rail;
    std::getline(fields, field, ',');
    rail.link_layer = field == "1" ? ibv::kInfiniband : ibv::kEthernet;
    while (std::getline(fields, field, ',') && rail.gids.size() <= kMaxGids)
      if (field == kCm)
        rail.connect = Connect::automatic;
      else if (field == kCmOnly)
        rail.connect = Connect::cm;
      else
        rail.gids.push_back(decode_gid(field));
    rails.push_back(std::move(rail));
  }
  if (rails.size() > std::size_t{kMaxRails} || std::to_string(rails.size()) != count)
    throw Error("its list of RDMA rails is damaged");
  return rails;
}

}  // namespace dicomm::verbs
