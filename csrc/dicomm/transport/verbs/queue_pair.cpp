#include "transport/verbs/queue_pair.h"

#include <fcntl.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

constexpr std::uint32_t kInlineBytes = 256;
// 0.96 ms: after so long a sender looks again whether there is a receive buffer.
constexpr std::uint8_t kRnrTimer = 13;
constexpr int kMaxReads = 16;
constexpr std::uint8_t kHopLimit = 64;  // 1 would not survive a router

}  // namespace

QueuePair::QueuePair(const Rail& rail, const Settings& settings, const QueueDepths& depths,
                     ibv::Srq* shared_receives)
    : rail_(rail), settings_(settings), library_(rail.device->library()) {
  const Device& device = *rail.device;
  channel_ = library_.create_comp_channel(device.context());
  if (channel_) {
    channel_fd_.emplace(channel_->fd);
    ::fcntl(channel_->fd, F_SETFL, ::fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
    cq_ = library_.create_cq(device.context(), static_cast<int>(depths.sends + depths.receives),
                             nullptr, channel_, 0);
  }
  ibv::QpInit init{};
  init.send_cq = init.receive_cq = cq_;
  init.srq = shared_receives;
  init.type = ibv::QpType::rc;
  init.capacity = {depths.sends, shared_receives ? 0 : depths.receives, 1, 1, kInlineBytes};
  if (cq_) qp_ = library_.create_qp(device.pd(), &init);
  if (cq_ && !qp_) {  // the device may take less inline, or none
    init.capacity.max_inline_bytes = 0;
    qp_ = library_.create_qp(device.pd(), &init);
  }
  if (!qp_) {
    const int error = errno;
    reset();
    throw Error(text("cannot make a queue pair on ", rail.describe(), ": ", system_error(error)));
  }
  inline_bytes_ = init.capacity.max_inline_bytes;
  mtu_ = rail.attributes.active_mtu;
  if (settings.mtu_bytes)
    mtu_ = std::min(mtu_, std::countr_zero(static_cast<unsigned>(*settings.mtu_bytes)) - 7);
  (void)!::getrandom(&psn_, sizeof psn_, 0);
  psn_ &= 0xffffff;
  ibv::QpAttributes attributes{};
  attributes.state = ibv::QpState::init;
  attributes.port = static_cast<std::uint8_t>(rail.port);
  attributes.access = ibv::kRemoteRead | ibv::kRemoteWrite;
  try {
    modify(attributes, ibv::kState | ibv::kPkeyIndex | ibv::kPort | ibv::kAccessFlags, "init");
  } catch (...) {
    reset();
    throw;
  }
}

QueuePair::~QueuePair() { reset(); }

void QueuePair::reset() {
  destroy();
  if (cq_) library_.destroy_cq(cq_);
  channel_fd_.reset();
  if (channel_) library_.destroy_comp_channel(channel_);
}

void QueuePair::destroy() {
  if (!qp_) return;
  close();
  library_.destroy_qp(qp_);
  qp_ = nullptr;
}

void QueuePair::close() {
  if (closed_) return;
  closed_ = true;
  ibv::QpAttributes attributes{};
  attributes.state = ibv::QpState::error;
  library_.modify_qp(qp_, &attributes, ibv::kState);
}

void QueuePair::modify(ibv::QpAttributes& attributes, int mask, const char* step) {
  const int error = library_.modify_qp(qp_, &attributes, mask);
  if (error != 0)
    throw Error(text("the queue pair on ", rail_.describe(), " cannot go to state ", step, ": ",
                     system_error(error > 0 ? error : errno)));
}

RailCard QueuePair::card(const GidEntry* gid) const {
  RailCard card{};
  if (gid) {
    card.gid = gid->gid;
    card.roce_v2 = gid->roce_v2;
  }
  card.qp_number = qp_->number;
  card.psn = psn_;
  card.lid = rail_.attributes.lid;
  card.link_layer = rail_.attributes.link_layer;
  card.mtu = static_cast<std::uint8_t>(mtu_);
  card.reads_in = static_cast<std::uint8_t>(
      std::clamp(rail_.device->attributes().max_qp_rd_atom, 0, kMaxReads));
  card.port = static_cast<std::uint8_t>(rail_.port);
  card.abridges = 1;
  return card;
}

ibv::QpAttributes QueuePair::route(const RailCard& theirs, const GidEntry* gid) const {
  ibv::QpAttributes attributes{};
  attributes.path_mtu = mtu_;
  attributes.destination_qp = theirs.qp_number;
  attributes.receive_psn = theirs.psn & 0xffffff;
  attributes.send_psn = psn_;
  ibv::Address& address = attributes.address;
  address.port = static_cast<std::uint8_t>(rail_.port);
  address.lid = theirs.lid;
  if (gid) {
    address.is_global = 1;
    address.route.destination = theirs.gid;
    address.route.gid_index = static_cast<std::uint8_t>(gid->index);
    address.route.hop_limit = kHopLimit;
  }
  return attributes;
}

void QueuePair::connect(const RailCard& theirs, const ibv::QpAttributes& route) {
  if (theirs.mtu < 1 || theirs.mtu > 5)
    throw Error(text("the peer's rail has an impossible MTU (code ", int{theirs.mtu}, ")"));
  mtu_ = std::min({mtu_, int{theirs.mtu}, route.path_mtu});
  reads_out_ = static_cast<std::uint32_t>(
      std::clamp(rail_.device->attributes().max_qp_init_rd_atom, 0, int{theirs.reads_in}));
  ibv::QpAttributes attributes = route;
  attributes.state = ibv::QpState::rtr;
  attributes.path_mtu = mtu_;
  attributes.max_reads_in = static_cast<std::uint8_t>(
      std::clamp(rail_.device->attributes().max_qp_rd_atom, 0, kMaxReads));
  attributes.min_rnr_timer = kRnrTimer;
  ibv::GlobalRoute& global = attributes.address.route;
  global.hop_limit = static_cast<std::uint8_t>(settings_.hop_limit.value_or(global.hop_limit));
  global.traffic_class =
      static_cast<std::uint8_t>(settings_.traffic_class.value_or(global.traffic_class));
  modify(attributes,
         ibv::kState | ibv::kAddressVector | ibv::kPathMtu | ibv::kDestinationQp |
             ibv::kReceivePsn | ibv::kMaxReadsIn | ibv::kMinRnrTimer,
         "ready to receive");
  attributes.state = ibv::QpState::rts;
  attributes.timeout = static_cast<std::uint8_t>(settings_.timeout);
  attributes.retry_count = static_cast<std::uint8_t>(settings_.retry_count);
  attributes.rnr_retry = static_cast<std::uint8_t>(settings_.rnr_retry);
  attributes.max_reads_out = static_cast<std::uint8_t>(reads_out_);
  modify(attributes,
         ibv::kState | ibv::kTimeout | ibv::kRetryCount | ibv::kRnrRetry | ibv::kSendPsn |
             ibv::kMaxReadsOut,
         "ready to send");
}

void QueuePair::post(ibv::SendRequest* first) {
  if (const int error = ibv::post(qp_, first))
    throw RailError(text("its device took no more work: ", system_error(error)));
}

void QueuePair::arm() {
  if (armed_) return;
  armed_ = ibv::request_event(cq_) == 0;
}

void QueuePair::collect_events() {
  ibv::Cq* cq;
  void* context;
  unsigned events = 0;
  while (library_.get_cq_event(channel_, &cq, &context) == 0) ++events;
  if (events == 0) return;
  library_.ack_cq_events(cq_, events);
  armed_ = false;
}

}  // namespace dicomm::verbs
