#include "core/communicator.h"

#include <numeric>

#include "core/engine.h"
#include "core/requests.h"
#include "core/sealed_store.h"
#include "core/text.h"

namespace dicomm {

namespace {

// A single request keeps the requests and their engine; only this keeps them open. In a forked
// child what asks for something is refused, and what lets go of something does nothing.
class EngineCommunicator final : public Communicator,
                                 public std::enable_shared_from_this<EngineCommunicator> {
 public:
  // shared_with: whose connections these are, if not its own.
  explicit EngineCommunicator(std::shared_ptr<Requests> requests,
                              std::shared_ptr<Communicator> shared_with = nullptr)
      : requests_(std::move(requests)), shared_with_(std::move(shared_with)) {}
  ~EngineCommunicator() override { close(); }

  std::shared_ptr<Communicator> subgroup(std::shared_ptr<Store> store, const Options& options,
                                         const std::vector<int>& ranks) override;

  int rank() const override { return requests_->options().rank; }
  int world_size() const override { return requests_->options().world_size; }
  std::chrono::milliseconds timeout() const override { return requests_->options().timeout; }
  const std::string& secret() const override { return requests_->options().secret; }
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
    if (!shared_with_ && engine().is_here()) engine().connections().declare_memory(region);
  }
  void forget_memory(std::uint64_t address, std::uint64_t bytes) override {
    if (!shared_with_ && engine().is_here()) engine().connections().forget_memory(address, bytes);
  }
  bool reaches_declared_memory() const override {
    return engine().connections().reaches_declared_memory();
  }
  void abort(const std::string& reason) override {
    if (engine().is_here()) requests_->abort(reason);
  }
  void relay(const std::string& cause) override {
    if (engine().is_here()) requests_->relay(cause);
  }
  std::string failure() const override { return requests().failure(); }
  void require_own_process() const override { engine().require_here(); }
  void close() override {
    if (engine().is_here()) engine().close(*requests_);
  }

 private:
  Engine& engine() const { return requests_->engine(); }
  Requests& requests() const {
    engine().require_here();
    return *requests_;
  }
  std::vector<int> world_ranks(const Options& options, const std::vector<int>& ranks) const;

  const std::shared_ptr<Requests> requests_;
  const std::shared_ptr<Communicator> shared_with_;
};

void require_sound(const Options& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    throw Error(text("rank ", options.rank, " of ", options.world_size,
                     ": expected 0 <= rank < world_size"));
  if (options.world_size > 1 && options.secret.empty())
    throw Error("the job's secret is empty: every rank needs the same non-empty secret");
  if (options.timeout <= std::chrono::milliseconds(0)) throw Error("timeout must be positive");
}

// The group's, as its first rank chose it; 0: the group makes its own connections.
std::uint32_t agreed_context(SealedStore& store, Engine& engine, const Options& options,
                             const std::vector<int>& members) {
  const bool serves = engine.serves(options);
  if (options.world_size == 1) return serves ? engine.new_context(members) : 0;
  const std::string key = text("dicomm/", options.name, "/context");
  if (options.rank == 0) {
    const std::uint32_t context = serves ? engine.new_context(members) : 0;
    store.set(key, std::to_string(context));
    return context;
  }
  if (options.secret != engine.me().secret) return 0;  // it might not be able to read the answer
  const std::uint32_t context = std::stoul(store.get(key, options.timeout));
  if (context != 0 && !serves)
    throw Error(text("group '", options.name, "': this rank, ", options.rank_label,
                     ", asks for other connections (transport, NICs or address) than those "
                     "that the group's first rank shares; expected the same on every rank"));
  return context;
}

std::vector<int> EngineCommunicator::world_ranks(const Options& options,
                                                 const std::vector<int>& ranks) const {
  std::vector<int> world_ranks;
  std::vector<bool> named(world_size());
  for (const int rank : ranks) {
    if (rank < 0 || rank >= world_size())
      throw Error(text("subgroup: rank ", rank, " is not one of the ", world_size(),
                       " ranks of the communicator"));
    world_ranks.push_back(requests_->world_rank(rank));
    if (named[rank]) throw Error(text("subgroup: rank ", rank, " is named twice"));
    named[rank] = true;
  }
  if (static_cast<int>(ranks.size()) != options.world_size || ranks[options.rank] != rank())
    throw Error(text("subgroup: rank ", options.rank, " of ", options.world_size,
                     " is not this process, rank ", rank(), ", in the ", ranks.size(),
                     " ranks that were named"));
  return world_ranks;
}

std::shared_ptr<Communicator> EngineCommunicator::subgroup(std::shared_ptr<Store> store,
                                                           const Options& options,
                                                           const std::vector<int>& ranks) {
  require_sound(options);
  const std::vector<int> members = world_ranks(options, ranks);
  engine().require_here();
  SealedStore sealed(store, options.secret);
  const std::uint32_t context = agreed_context(sealed, engine(), options, members);
  if (context == 0) return create(std::move(store), engine().completed(options));
  return std::make_shared<EngineCommunicator>(
      Requests::create(requests_->shared_engine(), options, context, members), shared_from_this());
}

}  // namespace

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Store> store,
                                                   const Options& options) {
  require_sound(options);
  auto sealed = std::make_shared<SealedStore>(std::move(store), options.secret);
  auto engine = Engine::create(std::move(sealed), options);
  std::vector<int> ranks(options.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  auto communicator =
      std::make_shared<EngineCommunicator>(Requests::create(engine, options, 0, ranks));
  engine->start();
  return communicator;
}

}  // namespace dicomm
