#include "core/communicator.h"

#include "core/engine.h"
#include "core/text.h"

namespace dicomm {

namespace {

// Requests keep the engine; only this keeps it open.
class EngineCommunicator final : public Communicator {
 public:
  explicit EngineCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~EngineCommunicator() override { engine_->close(); }

  int rank() const override { return engine_->rank(); }
  int world_size() const override { return engine_->world_size(); }
  std::chrono::milliseconds timeout() const override { return engine_->timeout(); }
  std::shared_ptr<Request> isend(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
                                 std::int64_t ready_at_ns) override {
    return engine_->isend(data, bytes, peer, tag, ready_at_ns);
  }
  std::shared_ptr<Request> irecv(void* data, std::size_t capacity, int peer,
                                 std::uint64_t tag) override {
    return engine_->irecv(data, capacity, peer, tag);
  }
  void send(const void* data, std::size_t bytes, int peer, std::uint64_t tag,
            Timeout timeout) override {
    engine_->send(data, bytes, peer, tag, timeout);
  }
  std::size_t recv(void* data, std::size_t capacity, int peer, std::uint64_t tag,
                   Timeout timeout) override {
    return engine_->recv(data, capacity, peer, tag, timeout);
  }
  void set_link(int peer, const LinkPace& pace) override { engine_->set_link(peer, pace); }
  LinkPace link(int peer) const override { return engine_->link(peer); }
  std::uint64_t bytes_sent(int peer) const override { return engine_->bytes_sent(peer); }
  LinkDescription describe_link(int peer) const override { return engine_->describe_link(peer); }
  void declare_memory(const MemoryRegion& region) override { engine_->declare_memory(region); }
  void forget_memory(std::uint64_t address, std::uint64_t bytes) override {
    engine_->forget_memory(address, bytes);
  }
  bool reaches_declared_memory() const override { return engine_->reaches_declared_memory(); }
  void abort(const std::string& reason) override { engine_->abort(reason); }
  void relay(const std::string& cause) override { engine_->relay(cause); }
  std::string failure() const override { return engine_->failure(); }
  void close() override { engine_->close(); }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace

Transport transport_named(const std::string& name) {
  if (name == "auto") return Transport::automatic;
  if (name == "shm") return Transport::shm;
  if (name == "tcp") return Transport::tcp;
  if (name == "verbs") return Transport::verbs;
  throw Error(text("transport '", name, "': expected auto, shm, tcp or verbs"));
}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Store> store,
                                                   const Options& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    throw Error(text("rank ", options.rank, " of ", options.world_size,
                     ": expected 0 <= rank < world_size"));
  if (options.world_size > 1 && options.secret.empty())
    throw Error("the job's secret is empty: every rank needs the same non-empty secret");
  if (options.timeout <= std::chrono::milliseconds(0)) throw Error("timeout must be positive");
  auto engine = std::make_shared<Engine>(std::move(store), options);
  engine->start();
  return std::make_shared<EngineCommunicator>(std::move(engine));
}

}  // namespace dicomm
