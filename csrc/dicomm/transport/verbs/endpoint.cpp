#include "transport/verbs/endpoint.h"

#include <algorithm>
#include <bit>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

struct Route {
  bool exists = false;
  const GidEntry* gid = nullptr;  // null: by LID, within an InfiniBand subnet
};

Route route(std::uint8_t link_layer, const std::vector<GidEntry>& mine,
            const PublishedRail& theirs) {
  if (link_layer != theirs.link_layer) return {};
  if (link_layer == ibv::kInfiniband) return {true, nullptr};
  const GidEntry* gid = choose_gid(mine, theirs.gids);
  return {gid != nullptr, gid};
}

}  // namespace

bool reachable(const std::vector<PublishedRail>& mine, const std::vector<PublishedRail>& theirs) {
  for (std::size_t i = 0; i < std::min(mine.size(), theirs.size()); ++i)
    if (route(mine[i].link_layer, mine[i].gids, theirs[i]).exists) return true;
  return false;
}

namespace {

// How a rail of both sides is connected. Throws Error where one will not do what the other must.
Connect agreed(Connect mine, Connect theirs, const Link& link) {
  if (mine == Connect::cm && theirs == Connect::bootstrap)
    throw Error(text("connect 'cm' was asked for, but the peer of rail ", link.describe(),
                     " has no rdma_cm, or is told not to use it"));
  if (mine == Connect::bootstrap && theirs == Connect::cm)
    throw Error(text("the peer asks for connect 'cm', but rail ", link.describe(),
                     " has no rdma_cm, or is told not to use it"));
  return std::min(mine, theirs) == Connect::bootstrap ? Connect::bootstrap : std::max(mine, theirs);
}

}  // namespace

Endpoint::Endpoint(std::shared_ptr<Rails> rails, const std::vector<PublishedRail>& theirs)
    : rails_(std::move(rails)) {
  card_.version = kCardVersion;
  card_.slots = kSlots;
  card_.slot_bytes = kSlotBytes;
  const std::size_t count = std::min(rails_->rails.size(), theirs.size());
  card_.rails = static_cast<std::uint32_t>(count);
  bool any = false;
  for (std::size_t i = 0; i < count; ++i) {
    const Rail& rail = rails_->rails[i];
    const Route found = route(rail.attributes.link_layer, rail.gids, theirs[i]);
    links_.push_back(found.exists ? std::make_unique<Link>(*rails_, i, found.gid) : nullptr);
    if (!found.exists) continue;
    card_.rail[i] = links_[i]->card();
    Connect mine = rails_->connect(found.gid);
    // Tried in vain before: that is not waited for again.
    if (rails_->cm_failed >> i & 1 && theirs[i].connect != Connect::cm && mine != Connect::cm)
      mine = Connect::bootstrap;
    card_.rail[i].connect = agreed(mine, theirs[i].connect, *links_[i]);
    any = true;
  }
  if (!any)
    throw Error(
        "no RDMA rail of this rank reaches its peer's: their networks differ (InfiniBand and "
        "Ethernet, RoCE v1 and v2, IPv4 and IPv6)");
}

void Endpoint::connect(const Card& theirs) {
  if (theirs.version != kCardVersion)
    throw Error(text("the peer speaks version ", theirs.version, " of dicomm's verbs, this rank ",
                     kCardVersion));
  if (!std::has_single_bit(theirs.slots) || theirs.slot_bytes <= sizeof(SlotHeader))
    throw Error("the peer's card has impossible slots");
  bool any = false;
  links_.resize(
      std::min<std::size_t>(links_.size(), std::min<std::uint32_t>(theirs.rails, kMaxRails)));
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (theirs.rail[i].qp_number == 0) links_[i].reset();
    if (!links_[i]) continue;
    any = true;
    if (cm_ && cm_->has(i)) continue;
    if (card_.rail[i].connect == Connect::bootstrap || theirs.rail[i].cm_port == 0) {
      links_[i]->connect(theirs.rail[i]);
      continue;
    }
    if (!cm_) cm_ = std::make_unique<CmMeeting>(rails_->cm);
    cm_->call(i, *links_[i], theirs.rail[i]);
  }
  if (!any) throw Error("no RDMA rail connects this rank with its peer");
  theirs_ = theirs;
}

std::unique_ptr<Stream> Endpoint::stream(Fd socket, bool dialler) {
  dismiss(socket);
  return std::make_unique<VerbsStream>(std::move(rails_), std::move(links_), std::move(socket),
                                       theirs_, dialler);
}

std::vector<PublishedRail> published(const Card& card) {
  std::vector<PublishedRail> rails;
  if (card.version == 0) return rails;
  if (card.rails > kMaxRails) throw Error("the peer's card has too many rails");
  for (std::uint32_t i = 0; i < card.rails; ++i) {
    const RailCard& rail = card.rail[i];
    PublishedRail published;
    if (rail.qp_number != 0) published.link_layer = rail.link_layer;
    published.gids.push_back({rail.gid, rail.roce_v2 != 0});
    if (rail.connect <= Connect::cm) published.connect = rail.connect;
    rails.push_back(std::move(published));
  }
  return rails;
}

}  // namespace dicomm::verbs
