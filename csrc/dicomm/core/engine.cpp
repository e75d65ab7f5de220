#include "core/engine.h"

#include <unistd.h>

#include "core/clock.h"
#include "core/host.h"
#include "core/text.h"
#include "transport/registry.h"

namespace dicomm {

namespace {

// How long close() tries to hand over what was already counted as sent.
constexpr std::chrono::seconds kLinger{2};

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
      requests_(*this, options_, me_, guard_, poller_, connections_, progress_),
      connections_(std::move(store), options_, me_, guard_, poller_, requests_.ledger(),
                   requests_.matcher(), requests_),
      progress_(me_.rank, guard_, poller_, requests_.ledger(), requests_.chip_queue(),
                connections_) {}

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

void Engine::close() {
  {
    Lock lock(guard_.mutex);
    if (closed_) return;
    closed_ = true;
    progress_.finish_chip_copies(lock, deadline_after(options_.timeout));
    connections_.leave_all();
    requests_.close();
    progress_.drain(lock, Clock::now() + kLinger);
    progress_.stop(lock);
  }
  progress_.join();
  connections_.close();
  poller_.close();
}

}  // namespace dicomm
