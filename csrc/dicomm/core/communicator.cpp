#include "core/communicator.h"

#include "core/engine.h"
#include "core/sealed_store.h"
#include "core/text.h"

namespace dicomm {

namespace {

// Requests keep the engine; only this keeps it open. In a forked child what asks for something is
// refused, and what lets go of something does nothing.
class EngineCommunicator final : public Communicator {
 public:
  explicit EngineCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~EngineCommunicator() override { close(); }

  int rank() const override { return engine_->options().rank; }
  int world_size() const override { return engine_->options().world_size; }
  std::chrono::milliseconds timeout() const override { return engine_->options().timeout; }
  std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                                 std::int64_t ready_at_ns,
                                 std::shared_ptr<ChipWork> after) override {
    return requests().isend(data, bytes, peer, tag, ready_at_ns, nullptr, std::move(after));
  }
  std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                                 std::shared_ptr<ChipWork> after) override {
    return requests().irecv(data, capacity, peer, tag, nullptr, std::move(after));
  }
  std::shared_ptr<Request> isend(std::shared_ptr<ChipBuffer> buffer, std::size_t bytes, int peer,
                                 std::uint64_t tag, std::shared_ptr<ChipWork> after) override {
    return requests().isend(nullptr, bytes, peer, tag, 0, std::move(buffer), std::move(after));
  }
  std::shared_ptr<Request> irecv(std::shared_ptr<ChipBuffer> buffer, std::size_t capacity, int peer,
                                 std::uint64_t tag) override {
    return requests().irecv(nullptr, capacity, peer, tag, std::move(buffer));
  }
  void send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
            Timeout timeout) override {
    requests().send(data, bytes, peer, tag, timeout);
  }
  std::size_t recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                   Timeout timeout) override {
    return requests().recv(data, capacity, peer, tag, timeout);
  }
  void start(RequestState& request, std::int64_t ready_at_ns) override {
    requests().start(request, ready_at_ns);
  }
  void set_link(int peer, const LinkPace& pace) override { requests().set_link(peer, pace); }
  LinkPace link(int peer) const override { return requests().link(peer); }
  std::uint64_t bytes_sent(int peer) const override { return requests().bytes_sent(peer); }
  LinkDescription describe_link(int peer) const override { return requests().describe_link(peer); }
  void declare_memory(const MemoryRegion& region) override {
    if (engine_->is_here()) engine_->connections().declare_memory(region);
  }
  void forget_memory(std::uint64_t address, std::uint64_t bytes) override {
    if (engine_->is_here()) engine_->connections().forget_memory(address, bytes);
  }
  bool reaches_declared_memory() const override {
    return engine_->connections().reaches_declared_memory();
  }
  void abort(const std::string& reason) override {
    if (engine_->is_here()) engine_->requests().abort(reason);
  }
  void relay(const std::string& cause) override {
    if (engine_->is_here()) engine_->requests().relay(cause);
  }
  std::string failure() const override { return requests().failure(); }
  void require_own_process() const override { engine_->require_here(); }
  void close() override {
    if (engine_->is_here()) engine_->close();
  }

 private:
  Requests& requests() const {
    engine_->require_here();
    return engine_->requests();
  }

  std::shared_ptr<Engine> engine_;
};

}  // namespace

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Store> store,
                                                   const Options& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    throw Error(text("rank ", options.rank, " of ", options.world_size,
                     ": expected 0 <= rank < world_size"));
  if (options.world_size > 1 && options.secret.empty())
    throw Error("the job's secret is empty: every rank needs the same non-empty secret");
  if (options.timeout <= std::chrono::milliseconds(0)) throw Error("timeout must be positive");
  auto sealed = std::make_shared<SealedStore>(std::move(store), options.secret);
  auto engine = Engine::create(std::move(sealed), options);
  engine->start();
  return std::make_shared<EngineCommunicator>(std::move(engine));
}

}  // namespace dicomm
