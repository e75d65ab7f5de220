#include "backend.h"

#include <pybind11/gil.h>
#include <pybind11/pybind11.h>

#include "core/sealed_store.h"
#include "errors.h"
#include "store.h"

namespace dicomm {

namespace {

// The bits of a c10d tag; collectives' tags have the top bit set.
std::uint64_t message_tag(int tag) { return static_cast<std::uint32_t>(tag); }

// Bounds a throwing call into libdicomm: c10 errors are all that torch.distributed knows.
template <class F>
auto guarded(Membership& membership, const char* operation, F&& function) {
  try {
    return function();
  } catch (const Error& error) {
    std::rethrow_exception(translate(error, membership, operation));
  }
}

std::string peer_key(const std::string& name, int rank) {
  return "dicomm/" + name + "/peer/" + std::to_string(rank);
}

// words: what the others must know to send this rank large messages; `sealed` is the same store.
std::shared_ptr<Membership> join(std::shared_ptr<Store> store, Store& sealed,
                                 const Options& options, const std::string& words,
                                 const std::shared_ptr<Communicator>& shared_with,
                                 const std::vector<int>& ranks) {
  try {
    sealed.set(peer_key(options.name, options.rank), words);
    return Membership::create(std::move(store), options, shared_with, ranks);
  } catch (const Error& error) {
    C10_THROW_ERROR(DistBackendError,
                    "dicomm process group '" + options.name + "': " + error.what());
  }
}

}  // namespace

Backend::Backend(c10::intrusive_ptr<c10d::Store> store, const dicomm::Options& options,
                 Strategy strategy, const std::shared_ptr<Communicator>& shared_with,
                 const std::vector<int>& ranks)
    : c10d::Backend(options.rank, options.world_size),
      me_{strategy, dicomm::chip_memory_domain()},
      peers_(options.world_size) {
  auto whole = std::make_shared<TorchStore>(std::move(store));
  store_ = std::make_shared<SealedStore>(whole, options.secret);
  membership_ = join(std::move(whole), *store_, options,
                     name_of(strategy) + (" " + me_.chip_memory_domain), shared_with, ranks);
}

// The last owner may hold the interpreter's lock, which jobs that drop tensors need.
Backend::~Backend() {
  if (!Py_IsInitialized() || !PyGILState_Check()) return;
  pybind11::gil_scoped_release release;
  membership_.reset();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) { membership_->set_timeout(timeout); }

void Backend::abort() { membership_->abort("its process group was aborted"); }

void Backend::shutdown() { membership_->shutdown(); }

c10d::ErrorType Backend::getError() {
  if (membership_->error() == c10d::ErrorType::SUCCESS &&
      !membership_->communicator().failure().empty())
    return c10d::ErrorType::REMOTE_ERROR;  // heard of before an operation met it
  return membership_->error();
}

void Backend::set_link(int peer, double latency_s, double bytes_per_s) {
  guarded(*membership_, "set_link",
          [&] { membership_->communicator().set_link(peer, {latency_s, bytes_per_s}); });
}

std::uint64_t Backend::bytes_sent(int peer) const {
  return guarded(*membership_, "bytes_sent",
                 [&] { return membership_->communicator().bytes_sent(peer); });
}

// Chip memory that the RDMA devices turned out not to reach is copied to the host's first. How long
// messages are cut stays as the peers were told.
Strategy Backend::staging() const {
  return membership_->communicator().reaches_declared_memory() ? me_.strategy
                                                               : Strategy::cpu_mediated;
}

Staged Backend::stage(const at::Tensor& tensor, Access access, bool on_chip) const {
  Staged staged =
      on_chip ? Staged::on_chip(tensor, access) : Staged::uncopied(tensor, staging(), access);
  staged.copy_in(StreamMark::here_behind_the_host(tensor.device()));
  return staged;
}

std::vector<Staged> Backend::stage(const Tensors& tensors, Access access, bool on_chip) const {
  std::vector<Staged> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) result.push_back(stage(tensor, access, on_chip));
  return result;
}

// A message carries its sender's clock only over a paced link: give emulated chips' links that
// nobody described a pace that costs nothing.
void Backend::carry_clocks(c10::Device device) {
  if (carries_clocks_ || !Timeline(device).is_emulated()) return;
  carries_clocks_ = true;
  constexpr double unbounded_bytes_per_s = 1e18;
  Communicator& communicator = membership_->communicator();
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && communicator.link(peer).bytes_per_s == 0)
      communicator.set_link(peer, {0, unbounded_bytes_per_s});
}

Backend::WorkPtr Backend::track(WorkPtr work) {
  if (coalescing_) coalescing_->push_back(work);
  return work;
}

// Asked for only where both sides must cut a message alike.
const Backend::Peer& Backend::peer_of(int peer) {
  if (peer < 0 || peer >= size_ || peer == rank_) return me_;  // refused further on
  auto& known = peers_.at(peer);
  if (!known) {
    const std::string words =
        store_->get(peer_key(membership_->name(), peer), membership_->timeout());
    const std::size_t space = words.find(' ');
    known = {parse_strategy(words.substr(0, space)), words.substr(space + 1)};
  }
  return *known;
}

// Whether a large message with the peer goes whole, from chip to chip where both tensors are.
bool Backend::shares_chip_memory(const Peer& peer) const {
  return me_.strategy == Strategy::cpu_mediated && peer.strategy == Strategy::cpu_mediated &&
         !me_.chip_memory_domain.empty() && peer.chip_memory_domain == me_.chip_memory_domain;
}

// The same answer on every rank, also of one whose tensors are the host's: what is given is as long
// on all of them.
MayReach Backend::reduces_on_chips(const Tensors& given) {
  if (size_ == 1 || me_.chip_memory_domain.empty()) return nullptr;
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : given)
    bytes += static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
  if (bytes < kFewestBytesOnChips) return nullptr;
  return guarded(*membership_, "reduction", [&]() -> MayReach {
    for (int peer = 0; peer < size_; ++peer)
      if (!shares_chip_memory(peer_of(peer))) return nullptr;
    return chips_may_reach_;
  });
}

Backend::WorkPtr Backend::message(c10d::OpType type, const char* title, const at::Tensor& tensor,
                                  int peer, int tag) {
  const Access access = type == c10d::OpType::SEND ? Access::read : Access::write;
  return guarded(*membership_, title, [&]() -> WorkPtr {
    const bool large = MessageWork::in_chunks(tensor, Strategy::cpu_mediated, me_.strategy);
    const bool by_chips =
        large && peer != Communicator::any_source && shares_chip_memory(peer_of(peer));
    const bool chunked = large && !by_chips && peer != Communicator::any_source &&
                         MessageWork::in_chunks(tensor, me_.strategy, peer_of(peer).strategy);
    auto chip = by_chips ? ChipTensor::of(tensor, access) : nullptr;
    const auto buffer = chip
                            ? chip->staged()
                            : std::make_shared<Staged>(Staged::uncopied(tensor, staging(), access));
    carry_clocks(buffer->device());
    auto work = c10::make_intrusive<MessageWork>(membership_, type, title, buffer, std::move(chip),
                                                 peer, message_tag(tag), chunked);
    work->start();
    return track(std::move(work));
  });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  return message(c10d::OpType::SEND, "dicomm:send", only_tensor(tensors, "send"), peer, tag);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  return message(c10d::OpType::RECV, "dicomm:recv", only_tensor(tensors, "recv"), peer, tag);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return message(c10d::OpType::RECVANYSOURCE, "dicomm:recvAnySource", only_tensor(tensors, "recv"),
                 Communicator::any_source, tag);
}

void Backend::startCoalescing() {
  TORCH_CHECK(!coalescing_, "dicomm: already coalescing");
  coalescing_.emplace();
}

Backend::WorkPtr Backend::endCoalescing() {
  TORCH_CHECK(coalescing_, "dicomm: not coalescing");
  auto work = c10::make_intrusive<BatchWork>(std::move(*coalescing_));
  coalescing_.reset();
  return work;
}

}  // namespace dicomm
