#include "core/engine.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/host.h"
#include "core/requests.h"
#include "core/text.h"
#include "transport/registry.h"

namespace dicomm {

namespace {

// How long the end tries to hand over what was already counted as sent.
constexpr std::chrono::seconds kLinger{2};
// Of a context: the world rank that made it, and its number there.
constexpr int kContextNumberBits = 16;

Options with_environment(Options options) {
  options.transport = asked_transport(options);
  return options;
}

}  // namespace

Engine::Engine(std::shared_ptr<Store> store, const Options& options)
    : options_(with_environment(options)),
      me_{options.rank,       options.world_size, options.name,
          options.rank_label, host_name(),        options.secret},
      pid_(::getpid()),
      chip_queue_([](RequestState& request) { request.owner->chip_is_through(request); },
                  [](RequestState& request, const char* what) {
                    request.owner->chip_failed(request, what);
                  }),
      connections_(std::move(store), options_, me_, guard_, poller_, ledger_, matcher_, *this),
      progress_(me_.rank, guard_, poller_, ledger_, chip_queue_, connections_) {}

std::shared_ptr<Engine> Engine::create(std::shared_ptr<Store> store, const Options& options) {
  return {new Engine(std::move(store), options), [](Engine* engine) {
            if (engine->is_here()) delete engine;
          }};
}

void Engine::start() {
  if (me_.world_size > 1) connections_.open();
  progress_.start();
}

void Engine::require_here() const {
  if (is_here()) return;
  throw Error(text("this communicator belongs to process ", pid_, ", and this is process ",
                   ::getpid(), ", forked from it, which has none of its connections: let process ",
                   pid_, " communicate, or make a communicator for this process"));
}

bool Engine::serves(const Options& options) const {
  const Options asked = completed(options);
  return asked_transport(asked) == options_.transport && asked.secret == options_.secret &&
         asked.chip == options_.chip && asked.nics == options_.nics &&
         asked.verbs == options_.verbs && asked.listen_address == options_.listen_address;
}

Options Engine::completed(Options options) const {
  if (options.chip.empty()) options.chip = options_.chip;
  if (options.nics.empty()) options.nics = options_.nics;
  if (options.verbs == VerbsOptions()) options.verbs = options_.verbs;
  if (options.listen_address.empty()) options.listen_address = options_.listen_address;
  return options;
}

std::uint32_t Engine::new_context(const std::vector<int>& ranks) {
  const Lock held = guard_.lock();
  constexpr std::uint32_t kMost = (1 << kContextNumberBits) - 1;
  const bool all_there =
      std::ranges::all_of(ranks, [this](int rank) { return connections_.gone(rank).empty(); });
  if (closed_ || !all_there || contexts_ == kMost || static_cast<std::uint32_t>(me_.rank) > kMost)
    return 0;
  return static_cast<std::uint32_t>(me_.rank) << kContextNumberBits | ++contexts_;
}

void Engine::open(Requests& requests) {
  if (closed_) throw Error("the connections to share are closed: make the group before that");
  if (!open_.emplace(requests.context(), &requests).second)
    throw Error(text("two groups have the number ", requests.context()));
  for (const int rank : std::vector<int>(connections_.live_ranks()))
    if (const Connection* connection = connections_.live(rank);
        connection && connection->is_joined(requests.context()))
      requests.peer_joined(rank);
  for (int rank = 0; rank < me_.world_size; ++rank)
    if (requests.has_member(rank) && connections_.has_died(rank))
      requests.peer_failed(connections_.gone(rank));
}

void Engine::close(Requests& requests) {
  Lock lock(guard_.mutex);
  if (!requests.begins_to_close()) return;
  progress_.finish_chip_copies(lock, requests.context(),
                               deadline_after(requests.options().timeout));
  if (open_.size() > 1) return close_one(lock, requests);
  close_last(lock);
  lock.unlock();
  end();
}

// The others work on. What peers still read of this one's memory they let go of when they are told;
// a peer that does not is cut off at the request's release_by.
void Engine::close_one(Lock& lock, Requests& requests) {
  open_.erase(requests.context());
  requests.close();
  progress_.finish_requests(lock, requests.context());
}

void Engine::close_last(Lock& lock) {
  closed_ = true;
  connections_.leave_all();
  for (const auto& [context, requests] : std::exchange(open_, {})) requests->close();
  // Those of communicators that were closed before, whose buffers peers still held.
  ledger_.for_each([this](RequestState& request) { ledger_.finish(request, 0); });
  progress_.drain(lock, Clock::now() + kLinger);
}

void Engine::end() {
  {
    Lock lock(guard_.mutex);
    closed_ = true;
    if (std::exchange(ended_, true)) return;
    progress_.stop(lock);
  }
  progress_.join();
  connections_.close();
  poller_.close();
}

void Engine::peer_connected(int rank, Connection& connection) {
  for (const auto& [context, requests] : open_) requests->peer_connected(rank, connection);
}

void Engine::peer_said(int rank, const Connection::Word& word) {
  const auto found = open_.find(word.context);
  if (found == open_.end()) {
    Connection* connection = connections_.live(rank);
    if (word.kind != FrameKind::join || !connection || !matcher_.has_ended(word.context)) return;
    connection->send_leave(word.context);
    return connections_.settle(*connection);
  }
  Requests& requests = *found->second;
  if (!requests.has_member(rank)) return;
  if (word.kind == FrameKind::join)
    requests.peer_joined(rank);
  else if (word.kind == FrameKind::abort)
    requests.peer_failed(word.reason);
  else
    requests.peer_left(rank, connections_.describe(rank) + " left (closed its communicator)");
}

void Engine::peer_left(int rank) {
  for (const auto& [context, requests] : open_) requests->peer_left(rank, connections_.gone(rank));
  finish_doomed(rank);
}

void Engine::peer_failed(int rank) {
  for (const auto& [context, requests] : open_)
    if (requests->counts_on(rank))
      requests->peer_failed(connections_.gone(rank));
    else
      requests->peer_left(rank, connections_.gone(rank));  // what it left unanswered ends, too
  finish_doomed(rank);
}

// It holds no buffer any more.
void Engine::finish_doomed(int rank) {
  ledger_.for_each([&](RequestState& request) {
    if (request.peer_number == rank && request.outcome != Outcome::success)
      ledger_.finish(request, 0);
  });
}

}  // namespace dicomm
