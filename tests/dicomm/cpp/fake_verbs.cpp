#include "fake_verbs.h"

#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

namespace dicomm::testing {

namespace {

constexpr int kRemoteAccessError = 10;

struct Context {
  ibv::Context base{};
  FakeNic* nic;
};
struct Channel {
  ibv::Channel base{};
  ibv::Cq* rung = nullptr;
};
struct Queue {  // a completion queue; its first member is what ibv::Cq is
  ibv::Context* context;
  Channel* channel;
  std::deque<ibv::Completion> completions;
  bool armed = false;

  void push(const ibv::Completion& completion) {
    completions.push_back(completion);
    if (!armed) return;
    armed = false;
    channel->rung = reinterpret_cast<ibv::Cq*>(this);
    const std::uint64_t one = 1;
    (void)!::write(channel->base.fd, &one, sizeof one);
  }
};
using Receives = std::deque<std::pair<std::uint64_t, ibv::Piece>>;
struct SharedQueue {
  ibv::Srq base{};
  FakeNic* nic;
  Receives receives = {};
};
struct Pair {
  ibv::Qp base{};
  FakeNic* nic;
  std::uint32_t peer = 0;
  bool broken = false;
  Receives own;
  struct Held {
    ibv::SendRequest request;
    ibv::Piece piece;
  };
  std::vector<Held> held;  // reads
  struct HeldSend {
    ibv::SendRequest request;
    std::vector<std::byte> bytes;
  };
  std::vector<HeldSend> held_sends;

  Queue& queue() const { return *reinterpret_cast<Queue*>(base.send_cq); }
  Receives& receives() {
    return base.srq ? reinterpret_cast<SharedQueue*>(base.srq)->receives : own;
  }
};
struct Region {
  ibv::MemoryRegion base{};
  FakeNic* nic;
  bool is_dmabuf = false;
  // What was written to a chip, and is there only once the NIC has read something there.
  std::vector<std::pair<std::uint64_t, std::vector<std::byte>>> on_its_way = {};
};

std::map<std::uint32_t, Pair*> pairs;
std::map<std::uint32_t, Region*> regions;  // by key
std::uint32_t next_number = 1;
std::recursive_mutex whole;  // both sides of a connection may be made at once

FakeNic* nic_of(ibv::Context* context) { return reinterpret_cast<Context*>(context)->nic; }

std::byte* pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

// Whether the key's owner can reach that memory.
bool reachable(std::uint32_t key, std::uint64_t address, std::uint64_t bytes) {
  const auto found = regions.find(key);
  if (found == regions.end()) return false;
  const auto& region = *found->second;
  const auto first = reinterpret_cast<std::uint64_t>(region.base.address);
  return address >= first && address + bytes <= first + region.base.bytes &&
         region.nic->reaches(address);
}

std::vector<std::byte> bytes_of(const ibv::SendRequest& request) {
  std::vector<std::byte> bytes;
  for (int i = 0; i < request.piece_count; ++i) {
    const auto* first = pointer(request.pieces[i].address);
    bytes.insert(bytes.end(), first, first + request.pieces[i].bytes);
  }
  return bytes;
}

int do_send(Pair& from, const ibv::SendRequest& request, const std::vector<std::byte>& bytes) {
  const auto count = static_cast<std::uint32_t>(bytes.size());
  from.nic->sends.push_back(count);
  std::optional<std::uint32_t> immediate;
  if (request.opcode == ibv::SendOpcode::send_imm) immediate = request.immediate;
  return deliver(from.peer, bytes.data(), count, immediate) ? ibv::kSuccess
                                                            : ibv::kRnrRetryExceeded;
}

int do_read(Pair& into, const ibv::SendRequest& request) {
  const ibv::Piece& piece = *request.pieces;
  into.nic->reads.push_back(piece.bytes);
  if (piece.bytes > into.nic->port.max_msg_bytes ||
      !reachable(request.rkey, request.remote_address, piece.bytes) ||
      !reachable(piece.lkey, piece.address, piece.bytes))
    return kRemoteAccessError;
  for (const auto& [address, bytes] : std::exchange(regions[request.rkey]->on_its_way, {}))
    std::memcpy(pointer(address), bytes.data(), bytes.size());
  if (Region& there = *regions[piece.lkey]; there.is_dmabuf) {
    const auto* first = pointer(request.remote_address);
    there.on_its_way.emplace_back(piece.address, std::vector(first, first + piece.bytes));
    return ibv::kSuccess;
  }
  if (regions[request.rkey]->nic->garbles(request.remote_address))
    std::memset(pointer(piece.address), 0xff, piece.bytes);
  else
    std::memcpy(pointer(piece.address), pointer(request.remote_address), piece.bytes);
  return ibv::kSuccess;
}

void complete(Pair& pair, const ibv::SendRequest& request, int status) {
  if (status == ibv::kSuccess && !(request.flags & ibv::kSignaled)) return;
  const bool read = request.opcode == ibv::SendOpcode::rdma_read;
  ibv::Completion done{};
  done.id = request.id;
  done.status = status;
  done.opcode = read ? ibv::CompletionOpcode::rdma_read : ibv::CompletionOpcode::send;
  done.qp_number = pair.base.number;
  pair.queue().push(done);
}

int post_send(ibv::Qp* qp, ibv::SendRequest* request, ibv::SendRequest**) {
  const std::lock_guard held(whole);
  Pair& pair = *reinterpret_cast<Pair*>(qp);
  for (; request; request = request->next) {
    const bool read = request->opcode == ibv::SendOpcode::rdma_read;
    if (!pair.nic->takes(read ? Post::read : Post::send)) return ENOMEM;
    if (read && pair.nic->holds_reads) {
      pair.held.push_back({*request, *request->pieces});
      continue;
    }
    if (!read && pair.nic->holds_sends) {
      pair.held_sends.push_back({*request, bytes_of(*request)});
      continue;
    }
    complete(pair, *request,
             read ? do_read(pair, *request) : do_send(pair, *request, bytes_of(*request)));
  }
  return 0;
}

int post_receive(ibv::Qp* qp, ibv::ReceiveRequest* request, ibv::ReceiveRequest**) {
  const std::lock_guard held(whole);
  Pair& pair = *reinterpret_cast<Pair*>(qp);
  for (; request; request = request->next) {
    if (!pair.nic->takes(Post::receive)) return ENOMEM;
    pair.own.emplace_back(request->id, *request->pieces);
  }
  return 0;
}

int post_shared_receive(ibv::Srq* srq, ibv::ReceiveRequest* request, ibv::ReceiveRequest**) {
  const std::lock_guard held(whole);
  SharedQueue& queue = *reinterpret_cast<SharedQueue*>(srq);
  for (; request; request = request->next) {
    if (!queue.nic->takes(Post::receive)) return ENOMEM;
    queue.receives.emplace_back(request->id, *request->pieces);
    queue.nic->shared_receives = queue.receives.size();
  }
  return 0;
}

int poll_queue(ibv::Cq* cq, int count, ibv::Completion* completions) {
  const std::lock_guard held(whole);
  auto& waiting = reinterpret_cast<Queue*>(cq)->completions;
  int taken = 0;
  for (; taken < count && !waiting.empty(); waiting.pop_front())
    completions[taken++] = waiting.front();
  return taken;
}

int arm_queue(ibv::Cq* cq, int) {
  const std::lock_guard held(whole);
  reinterpret_cast<Queue*>(cq)->armed = true;
  return 0;
}

ibv::Context* open_device(ibv::Device* device) {
  auto* context = new Context{{}, reinterpret_cast<FakeNic*>(device)};
  context->base.device = device;
  context->nic->context = &context->base;
  context->base.command_fd = context->base.async_fd = -1;
  context->base.operations.poll_cq = poll_queue;
  context->base.operations.req_notify_cq = arm_queue;
  context->base.operations.post_send = post_send;
  context->base.operations.post_recv = post_receive;
  context->base.operations.post_srq_recv = post_shared_receive;
  return &context->base;
}

int close_device(ibv::Context* context) {
  delete reinterpret_cast<Context*>(context);
  return 0;
}

// A protection domain needs to know its NIC only.
ibv::Pd* alloc_pd(ibv::Context* context) { return reinterpret_cast<ibv::Pd*>(nic_of(context)); }

ibv::MemoryRegion* register_memory(ibv::Pd* pd, void* address, std::size_t bytes, int) {
  const std::lock_guard held(whole);
  auto* nic = reinterpret_cast<FakeNic*>(pd);
  if (!nic->registers(reinterpret_cast<std::uint64_t>(address))) {
    errno = EFAULT;
    return nullptr;
  }
  auto* region = new Region{.nic = nic};
  region->base.address = address;
  region->base.bytes = bytes;
  region->base.lkey = region->base.rkey = next_number++;
  regions[region->base.rkey] = region;
  ++nic->registrations;
  nic->registered_bytes += bytes;
  return &region->base;
}

ibv::MemoryRegion* register_dmabuf(ibv::Pd* pd, std::uint64_t offset, std::size_t bytes,
                                   std::uint64_t address, int fd, int access) {
  auto* nic = reinterpret_cast<FakeNic*>(pd);
  struct stat file{};
  if (!nic->registers_dmabuf || ::fstat(fd, &file) != 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  auto* memory = register_memory(pd, pointer(address), bytes, access);
  if (!memory) return nullptr;
  reinterpret_cast<Region*>(memory)->is_dmabuf = true;
  nic->dmabufs.push_back({file.st_ino, offset, bytes, address});
  return memory;
}

int deregister_memory(ibv::MemoryRegion* memory) {
  const std::lock_guard held(whole);
  auto* region = reinterpret_cast<Region*>(memory);
  --region->nic->registrations;
  region->nic->registered_bytes -= memory->bytes;
  regions.erase(memory->rkey);
  delete region;
  return 0;
}

ibv::Channel* create_channel(ibv::Context* context) {
  auto* channel = new Channel;
  channel->base = {context, ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), 0};
  return &channel->base;
}

int destroy_channel(ibv::Channel* channel) {
  const std::lock_guard held(whole);
  ::close(channel->fd);
  delete reinterpret_cast<Channel*>(channel);
  return 0;
}

ibv::Cq* create_queue(ibv::Context* context, int, void*, ibv::Channel* channel, int) {
  return reinterpret_cast<ibv::Cq*>(
      new Queue{context, reinterpret_cast<Channel*>(channel), {}, false});
}

int destroy_queue(ibv::Cq* cq) {
  const std::lock_guard held(whole);
  delete reinterpret_cast<Queue*>(cq);
  return 0;
}

int get_event(ibv::Channel* channel, ibv::Cq** cq, void** context) {
  const std::lock_guard held(whole);
  std::uint64_t count;
  if (::read(channel->fd, &count, sizeof count) != sizeof count) return -1;
  *cq = reinterpret_cast<Channel*>(channel)->rung;
  *context = nullptr;
  return 0;
}

ibv::Srq* create_shared_queue(ibv::Pd* pd, ibv::SrqInit*) {
  auto* nic = reinterpret_cast<FakeNic*>(pd);
  auto* queue = new SharedQueue{.nic = nic};
  queue->base.context = nic->context;
  return &queue->base;
}

int destroy_shared_queue(ibv::Srq* srq) {
  delete reinterpret_cast<SharedQueue*>(srq);
  return 0;
}

ibv::Qp* create_pair(ibv::Pd* pd, ibv::QpInit* init) {
  const std::lock_guard held(whole);
  auto* pair = new Pair;
  pair->nic = reinterpret_cast<FakeNic*>(pd);
  pair->base.context = reinterpret_cast<Queue*>(init->send_cq)->context;
  pair->base.send_cq = init->send_cq;
  pair->base.srq = init->srq;
  init->capacity.max_inline_bytes =
      std::min(init->capacity.max_inline_bytes, pair->nic->inline_bytes);
  pair->base.number = next_number++;
  pairs[pair->base.number] = pair;
  return &pair->base;
}

int modify_pair(ibv::Qp* qp, ibv::QpAttributes* attributes, int mask) {
  const std::lock_guard held(whole);
  auto* pair = reinterpret_cast<Pair*>(qp);
  pair->nic->connected.push_back(*attributes);
  if (mask & ibv::kDestinationQp) pair->peer = attributes->destination_qp;
  pair->broken = attributes->state == ibv::QpState::error;
  if (pair->broken) {
    for (const Pair::Held& read : std::exchange(pair->held, {}))
      complete(*pair, read.request, ibv::kFlushed);
    for (const Pair::HeldSend& send : std::exchange(pair->held_sends, {}))
      complete(*pair, send.request, ibv::kFlushed);
  }
  return 0;
}

int destroy_pair(ibv::Qp* qp) {
  const std::lock_guard held(whole);
  pairs.erase(qp->number);
  delete reinterpret_cast<Pair*>(qp);
  return 0;
}

}  // namespace

int finish_reads() {
  const std::lock_guard held(whole);
  int count = 0;
  for (auto& [number, pair] : pairs)
    for (Pair::Held& read : std::exchange(pair->held, {})) {
      read.request.pieces = &read.piece;
      complete(*pair, read.request, do_read(*pair, read.request));
      ++count;
    }
  return count;
}

void finish_sends(FakeNic& nic) {
  const std::lock_guard held(whole);
  for (auto& [number, pair] : pairs)
    if (pair->nic == &nic)
      for (const Pair::HeldSend& send : std::exchange(pair->held_sends, {}))
        complete(*pair, send.request, do_send(*pair, send.request, send.bytes));
}

bool deliver(std::uint32_t qp_number, const void* bytes, std::uint32_t count,
             std::optional<std::uint32_t> immediate) {
  const std::lock_guard held(whole);
  const auto found = pairs.find(qp_number);
  if (found == pairs.end() || found->second->broken) return false;
  Pair& to = *found->second;
  Receives& receives = to.receives();
  if (receives.empty()) return false;
  const auto [id, piece] = receives.front();
  receives.pop_front();
  if (to.base.srq) to.nic->shared_receives = receives.size();
  if (count > piece.bytes) return false;
  std::memcpy(pointer(piece.address), bytes, count);
  ibv::Completion received{};
  received.id = id;
  received.opcode = ibv::CompletionOpcode::receive;
  received.bytes = count;
  received.qp_number = qp_number;
  if (immediate) received.flags = ibv::kWithImmediate;
  received.immediate = immediate.value_or(0);
  to.queue().push(received);
  return true;
}

FakeNic::FakeNic(std::string name) : name(std::move(name)) {
  has_shared_queues(true);
  attributes.max_qp_rd_atom = attributes.max_qp_init_rd_atom = 16;
  port.state = ibv::PortState::active;
  port.active_mtu = 5;
  port.max_msg_bytes = 1 << 30;
  port.link_layer = ibv::kEthernet;
}

std::shared_ptr<const ibv::Library> fake_library() {
  auto library = std::make_shared<ibv::Library>();
  library->get_device_name = [](ibv::Device* device) {
    return reinterpret_cast<FakeNic*>(device)->name.c_str();
  };
  library->open_device = open_device;
  library->close_device = close_device;
  library->query_device = [](ibv::Context* context, ibv::DeviceAttributes* attributes) {
    *attributes = nic_of(context)->attributes;
    return 0;
  };
  library->query_port = [](ibv::Context* context, std::uint8_t, ibv::PortAttributes* port) {
    *port = nic_of(context)->port;
    return 0;
  };
  library->alloc_pd = alloc_pd;
  library->dealloc_pd = [](ibv::Pd*) { return 0; };
  library->reg_mr = register_memory;
  library->dereg_mr = deregister_memory;
  library->create_comp_channel = create_channel;
  library->destroy_comp_channel = destroy_channel;
  library->create_cq = create_queue;
  library->destroy_cq = destroy_queue;
  library->get_cq_event = get_event;
  library->ack_cq_events = [](ibv::Cq*, unsigned) {};
  library->create_srq = create_shared_queue;
  library->destroy_srq = destroy_shared_queue;
  library->create_qp = create_pair;
  library->modify_qp = modify_pair;
  library->destroy_qp = destroy_pair;
  library->wc_status_str = [](int status) { return status == 0 ? "success" : "an error"; };
  library->reg_dmabuf_mr = register_dmabuf;
  return library;
}

verbs::GidEntry ipv4_gid(int index, int a, int b, int c, int d, int prefix_bits) {
  verbs::GidEntry entry;
  entry.gid = {0,
               0,
               0,
               0,
               0,
               0,
               0,
               0,
               0,
               0,
               0xff,
               0xff,
               static_cast<std::uint8_t>(a),
               static_cast<std::uint8_t>(b),
               static_cast<std::uint8_t>(c),
               static_cast<std::uint8_t>(d)};
  entry.roce_v2 = true;
  entry.index = index;
  entry.prefix_bits = 96 + prefix_bits;
  return entry;
}

std::shared_ptr<verbs::Rails> fake_rails(const std::vector<FakeNic*>& nics, int host,
                                         const verbs::Settings& settings) {
  auto rails = std::make_shared<verbs::Rails>();
  rails->settings = settings;
  for (std::size_t i = 0; i < nics.size(); ++i) {
    rails->devices.push_back(
        std::make_shared<verbs::Device>(fake_library(), reinterpret_cast<ibv::Device*>(nics[i])));
    verbs::Rail rail;
    rail.device = rails->devices.back();
    rail.device_index = i;
    rail.attributes = nics[i]->port;
    rail.gids = {ipv4_gid(3, 10, static_cast<int>(i), 0, host)};
    rails->rails.push_back(std::move(rail));
  }
  rails->make_memory();
  return rails;
}

}  // namespace dicomm::testing
