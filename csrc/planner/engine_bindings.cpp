// The simulator's engine, for heteropp/simulator/engine.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>

#include "engine.h"

namespace py = pybind11;

namespace planner {

namespace {

using Way = std::vector<std::pair<int, double>>;
using Sent = std::tuple<int, int, double, Way>;  // a Transmission

Actor make_actor(std::vector<Op> ops, std::vector<double> seconds, std::vector<double> factors,
                 const std::vector<std::vector<Sent>>& outboxes, std::vector<int> messages,
                 double begin_s) {
  Actor actor{std::move(ops), std::move(seconds), std::move(factors), {}, std::move(messages),
              begin_s};
  for (const auto& outbox : outboxes) {
    auto& made = actor.outboxes.emplace_back();
    for (const auto& [receiver, inbox, latency_s, pipes] : outbox) {
      auto& one = made.emplace_back(Transmission{receiver, inbox, latency_s, {}});
      for (auto [pipe, pipe_s] : pipes) one.pipes.push_back({pipe, pipe_s});
    }
  }
  return actor;
}

void check(const std::vector<Actor>& actors) {
  for (const Actor& actor : actors) {
    std::size_t works = 0;
    for (auto [code, slot, micro_batch] : actor.ops) {
      const std::size_t sizes[] = {actor.seconds.size(), actor.outboxes.size(),
                                   actor.messages.size()};
      works += code == kWork;
      if (code < kWork || code > kMark || micro_batch < 0 || slot < 0 ||
          (code < kMark && static_cast<std::size_t>(slot) >= sizes[code]))
        throw std::invalid_argument("an op of a slot that is not there");
    }
    if (!actor.factors.empty() && actor.factors.size() < works)
      throw std::invalid_argument("fewer factors than works");
    for (const auto& outbox : actor.outboxes) {
      for (const Transmission& one : outbox) {
        if (one.receiver < 0 || static_cast<std::size_t>(one.receiver) >= actors.size())
          throw std::invalid_argument("a message to no actor");
        const auto& inboxes = actors[one.receiver].messages;
        if (one.inbox < 0 || static_cast<std::size_t>(one.inbox) >= inboxes.size())
          throw std::invalid_argument("a message to no inbox");
        for (const Hop& hop : one.pipes)
          if (hop.pipe < 0) throw std::invalid_argument("a message through no pipe");
      }
    }
  }
}

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<Actor>(m, "Actor", "A replica's table of ops; see heteropp.simulator.engine.Actor.")
      .def(py::init(&make_actor), py::kw_only(), py::arg("ops"), py::arg("seconds"),
           py::arg("factors"), py::arg("outboxes"), py::arg("messages"), py::arg("begin_s"));

  py::class_<Played>(m, "Played", "When each op of each actor began and ended.")
      .def_readonly("starts", &Played::starts)
      .def_readonly("ends", &Played::ends)
      .def_readonly("message_s", &Played::message_s)
      .def_readonly("next", &Played::next, "By actor: the op that it is stuck in, or their number.")
      .def_readonly("blocked", &Played::blocked, "Actors stuck in a send: whom each waits for.");

  m.def(
      "play",
      [](const std::vector<Actor>& actors, std::optional<int> slack, bool hold) {
        check(actors);
        return play(actors, slack, hold);
      },
      py::arg("actors"), py::arg("slack"), py::arg("hold"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace planner
