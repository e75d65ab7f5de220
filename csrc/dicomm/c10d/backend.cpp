#include "backend.h"

#include <pybind11/gil.h>
#include <pybind11/pybind11.h>

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

std::shared_ptr<Membership> join(c10::intrusive_ptr<c10d::Store> store, const Options& options) {
  try {
    return Membership::create(std::make_shared<TorchStore>(std::move(store)), options);
  } catch (const Error& error) {
    C10_THROW_ERROR(DistBackendError,
                    "dicomm process group '" + options.name + "': " + error.what());
  }
}

}  // namespace

Backend::Backend(c10::intrusive_ptr<c10d::Store> store, const dicomm::Options& options,
                 Strategy strategy)
    : c10d::Backend(options.rank, options.world_size),
      membership_(join(std::move(store), options)),
      strategy_(strategy) {}

// The last owner may hold the interpreter's lock, which jobs that drop tensors need.
Backend::~Backend() {
  if (!Py_IsInitialized() || !PyGILState_Check()) return;
  pybind11::gil_scoped_release release;
  membership_.reset();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) { membership_->set_timeout(timeout); }

void Backend::abort() { membership_->abort("its process group was aborted"); }

void Backend::shutdown() { membership_->shutdown(); }

void Backend::set_link(int peer, double latency_s, double bytes_per_s) {
  guarded(*membership_, "set_link",
          [&] { membership_->communicator().set_link(peer, {latency_s, bytes_per_s}); });
}

std::uint64_t Backend::bytes_sent(int peer) const {
  return guarded(*membership_, "bytes_sent",
                 [&] { return membership_->communicator().bytes_sent(peer); });
}

Staged Backend::stage(const at::Tensor& tensor, Access access) const {
  return Staged(tensor, strategy_, access);
}

std::vector<Staged> Backend::stage(const Tensors& tensors, Access access) const {
  std::vector<Staged> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) result.push_back(stage(tensor, access));
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

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  const Staged buffer = stage(only_tensor(tensors, "send"), Access::read);
  carry_clocks(buffer.device());
  const std::int64_t ready_at_ns = Timeline(buffer.device()).ready_at_ns();
  auto request = guarded(*membership_, "send", [&] {
    return membership_->communicator().isend(buffer.data(), buffer.bytes(), peer, message_tag(tag),
                                             ready_at_ns);
  });
  return track(c10::make_intrusive<MessageWork>(membership_, c10d::OpType::SEND, buffer,
                                                std::move(request)));
}

Backend::WorkPtr Backend::receive(Tensors& tensors, int peer, int tag, c10d::OpType type) {
  const Staged buffer = stage(only_tensor(tensors, "recv"), Access::write);
  carry_clocks(buffer.device());
  const Timeline timeline(buffer.device());
  if (!timeline.is_emulated()) timeline.ready_at_ns();  // earlier work may still use the buffer
  auto request = guarded(*membership_, "recv", [&] {
    return membership_->communicator().irecv(buffer.data(), buffer.bytes(), peer, message_tag(tag));
  });
  return track(c10::make_intrusive<MessageWork>(membership_, type, buffer, std::move(request)));
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  return receive(tensors, peer, tag, c10d::OpType::RECV);
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, Communicator::any_source, tag, c10d::OpType::RECVANYSOURCE);
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
