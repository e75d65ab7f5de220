#include "transport/verbs/cm.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

constexpr int kBacklog = 16;
// Of the kernel. A neighbour that answers at once may do so unnoticed: then it is asked again.
constexpr int kResolveMs = 100;

sockaddr_storage socket_address(const ibv::Gid& gid, std::uint16_t port) {
  sockaddr_storage address{};
  if (is_ipv4(gid)) {
    auto& ipv4 = reinterpret_cast<sockaddr_in&>(address);
    ipv4.sin_family = AF_INET;
    ipv4.sin_port = htons(port);
    std::memcpy(&ipv4.sin_addr, gid.data() + 12, 4);
  } else {
    auto& ipv6 = reinterpret_cast<sockaddr_in6&>(address);
    ipv6.sin6_family = AF_INET6;
    ipv6.sin6_port = htons(port);
    std::memcpy(&ipv6.sin6_addr, gid.data(), 16);
  }
  return address;
}

sockaddr* plain(sockaddr_storage& address) { return reinterpret_cast<sockaddr*>(&address); }

void check(int result, const char* what) {
  if (result != 0) throw Error(text("rdma_cm cannot ", what, ": ", system_error(errno)));
}

// Takes the same time whatever is told.
bool equal(const CmNonce& nonce, const cm::Parameters& told) {
  if (told.private_bytes < nonce.size()) return false;
  const auto* bytes = static_cast<const std::uint8_t*>(told.private_data);
  unsigned difference = 0;
  for (std::size_t i = 0; i < nonce.size(); ++i) difference |= nonce[i] ^ bytes[i];
  return difference == 0;
}

std::uint8_t at_most_255(int value) { return static_cast<std::uint8_t>(std::clamp(value, 0, 255)); }

}  // namespace

CmMeeting::CmMeeting(std::shared_ptr<const cm::Library> library) : library_(std::move(library)) {
  cm::Channel* channel = library_->create_event_channel();
  if (!channel) throw Error(text("rdma_cm cannot be used: ", system_error(errno)));
  auto fd = std::make_shared<ClosedInChildren>(channel->fd);
  channel_ = {channel, [library = library_, fd](cm::Channel* old) mutable {
                fd.reset();
                library->destroy_event_channel(old);
              }};
  ::fcntl(channel->fd, F_SETFL, ::fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
}

std::shared_ptr<cm::Id> CmMeeting::owned(cm::Id* id) const {
  return {id, [library = library_, channel = channel_](cm::Id* old) { library->destroy_id(old); }};
}

std::shared_ptr<cm::Id> CmMeeting::create_id() {
  cm::Id* id = nullptr;
  check(library_->create_id(channel_.get(), &id, nullptr, cm::PortSpace::tcp), "begin");
  return owned(id);
}

CmMeeting::Rail& CmMeeting::add(std::size_t number, const Link& link, const CmNonce& nonce) {
  rails_.resize(std::max(rails_.size(), number + 1));
  Rail& rail = rails_[number];
  rail.link = &link;
  rail.nonce = nonce;
  const verbs::Rail& here = link.pair.rail();
  const ibv::DeviceAttributes& device = here.device->attributes();
  rail.parameters.reads_in = at_most_255(device.max_qp_rd_atom);
  rail.parameters.reads_out = at_most_255(device.max_qp_init_rd_atom);
  rail.parameters.retry_count = 7;
  rail.parameters.rnr_retry = 7;
  rail.parameters.srq = link.shares_receives();
  rail.parameters.qp_number = link.pair.number();
  return rail;
}

void CmMeeting::listen(std::size_t number, const Link& link, RailCard& card) {
  CmNonce nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size()))
    throw Error(text("no random numbers: ", system_error(errno)));
  auto listener = create_id();
  auto address = socket_address(link.gid->gid, 0);
  check(library_->bind_addr(listener.get(), plain(address)), "bind to the rail's address");
  check(library_->listen(listener.get(), kBacklog), "listen");
  card.cm_port = ntohs(library_->get_src_port(listener.get()));
  add(number, link, nonce).listener = std::move(listener);
  card.cm_nonce = nonce;
}

void CmMeeting::call(std::size_t number, const Link& link, const RailCard& theirs) {
  Rail& rail = add(number, link, theirs.cm_nonce);
  try {
    rail.id = create_id();
    if (const auto& wanted = link.pair.settings().traffic_class) {
      std::uint8_t value = static_cast<std::uint8_t>(*wanted);
      check(library_->set_option(rail.id.get(), cm::kIdLevel, cm::kTypeOfService, &value, 1),
            "set the traffic class");
    }
    rail.to = socket_address(theirs.gid, theirs.cm_port);
    resolve_address(rail);
  } catch (const Error& error) {
    rail.failure = error.what();
  }
}

void CmMeeting::resolve_address(Rail& rail) {
  rail.step = "the peer's address";
  auto from = socket_address(rail.link->gid->gid, 0);
  check(library_->resolve_addr(rail.id.get(), plain(from), plain(rail.to), kResolveMs),
        "resolve the peer's address");
}

void CmMeeting::advance() {
  cm::Event* event;
  while (library_->get_cm_event(channel_.get(), &event) == 0) {
    const cm::EventType type = event->type;
    const int status = event->status;
    const bool calls = type == cm::EventType::connect_request;
    cm::Id *id = event->id, *listener = event->listener;
    const auto rail = std::find_if(rails_.begin(), rails_.end(), [&](const Rail& each) {
      return calls ? each.listener.get() == listener : each.id.get() == id;
    });
    const bool known = rail != rails_.end();
    const bool knows_nonce = calls && known && equal(rail->nonce, event->parameters);
    library_->ack_cm_event(event);  // destroying its id would wait for that
    if (calls && known) caller(*rail, owned(id), knows_nonce);
    if (!calls && known && rail->failure.empty()) progress(*rail, type, status);
  }
}

// Of the acceptor. Who is not accepted is rejected, and forgotten.
void CmMeeting::caller(Rail& rail, std::shared_ptr<cm::Id> id, bool knows_nonce) {
  if (knows_nonce && !rail.id) try {
      find_route(rail, id.get());
      check(library_->accept(id.get(), &rail.parameters), "accept");
      rail.id = std::move(id);
      return;
    } catch (const Error& error) {
      rail.failure = error.what();
      rail.connectable = false;
    }
  library_->reject(id.get(), nullptr, 0);
}

// Of the dialler.
void CmMeeting::progress(Rail& rail, cm::EventType event, int status) {
  cm::Id* id = rail.id.get();
  const verbs::Rail& here = rail.link->pair.rail();
  try {
    switch (event) {
      case cm::EventType::address_error:
        if (status != -ETIMEDOUT) throw Error(system_error(-status));
        return resolve_address(rail);
      case cm::EventType::address_resolved:
        if (here.device->library().get_device_name(id->verbs->device) != here.device->name() ||
            id->port != here.port)
          throw Error("the routing table leads to the peer over another RDMA device");
        rail.step = "its route";
        return check(library_->resolve_route(id, kResolveMs), "resolve the route");
      case cm::EventType::route_resolved:
        rail.step = "its peer's answer";
        rail.parameters.private_data = rail.nonce.data();
        rail.parameters.private_bytes = static_cast<std::uint8_t>(rail.nonce.size());
        return check(library_->connect(id, &rail.parameters), "connect");
      case cm::EventType::connect_response:
        return find_route(rail, id);
      case cm::EventType::established:
      case cm::EventType::disconnected:  // as the peer left: its socket tells
        return;
      default:
        throw Error(text(library_->event_str(event), " (",
                         status < 0 ? system_error(-status) : text("reason ", status), ")"));
    }
  } catch (const Error& error) {
    rail.failure = error.what();
  }
}

void CmMeeting::find_route(Rail& rail, cm::Id* id) const {
  rail.route = attributes(id, ibv::QpState::rtr);
  rail.route.send_psn = attributes(id, ibv::QpState::rts).send_psn;
  const auto& gid = *rail.link->gid;
  if (rail.link->pair.settings().gid_index && rail.route.address.route.gid_index != gid.index)
    throw Error(
        text("it chose GID ", int{rail.route.address.route.gid_index}, ", not ", gid.index));
  rail.connectable = true;
}

ibv::QpAttributes CmMeeting::attributes(cm::Id* id, ibv::QpState state) const {
  ibv::QpAttributes attributes{};
  attributes.state = state;
  int mask = 0;
  check(library_->init_qp_attr(id, &attributes, &mask), "tell the way");
  return attributes;
}

bool CmMeeting::calling() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.link && !rail.connectable && rail.failure.empty();
  });
}

const ibv::QpAttributes* CmMeeting::route(std::size_t rail) const {
  return has(rail) && rails_[rail].connectable ? &rails_[rail].route : nullptr;
}

std::string CmMeeting::failure(std::size_t rail) const {
  const Rail& found = rails_[rail];
  return found.failure.empty() ? text("waited in vain for ", found.step) : found.failure;
}

void CmMeeting::establish(std::size_t rail) {
  check(library_->establish(rails_[rail].id.get()), "tell the peer that it is connected");
}

}  // namespace dicomm::verbs
