// The simulator's engine, for heteropp/simulator/engine.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "engine.h"

namespace py = pybind11;

namespace planner {

namespace {

using Way = std::vector<std::pair<int, double>>;
using Sent = std::tuple<int, int, double, Way>;  // a Transmission

std::shared_ptr<Boxes> make_boxes(const std::vector<std::vector<Sent>>& outboxes,
                                  std::vector<int> messages) {
  auto boxes = std::make_shared<Boxes>();
  boxes->messages = std::move(messages);
  for (const auto& outbox : outboxes) {
    auto& made = boxes->outboxes.emplace_back();
    for (const auto& [receiver, inbox, latency_s, pipes] : outbox) {
      auto& one = made.emplace_back(Transmission{receiver, inbox, latency_s, {}});
      for (auto [pipe, pipe_s] : pipes) one.pipes.push_back({pipe, pipe_s});
    }
  }
  return boxes;
}

Actor make_actor(std::shared_ptr<Ops> ops, std::vector<double> seconds, std::vector<double> factors,
                 std::shared_ptr<Boxes> boxes, double begin_s) {
  return {std::move(ops), std::move(seconds), std::move(factors), std::move(boxes), begin_s};
}

void check(const std::vector<Actor>& actors) {
  for (const Actor& actor : actors) {
    std::size_t works = 0;
    for (auto [code, slot, micro_batch] : actor.ops->table) {
      const std::size_t sizes[] = {actor.seconds.size(), actor.boxes->outboxes.size(),
                                   actor.boxes->messages.size()};
      works += code == kWork;
      if (code < kWork || code > kMark || micro_batch < 0 || slot < 0 ||
          (code < kMark && static_cast<std::size_t>(slot) >= sizes[code]))
        throw std::invalid_argument("an op of a slot that is not there");
    }
    if (!actor.factors.empty() && actor.factors.size() < works)
      throw std::invalid_argument("fewer factors than works");
    for (const auto& outbox : actor.boxes->outboxes) {
      for (const Transmission& one : outbox) {
        if (one.receiver < 0 || static_cast<std::size_t>(one.receiver) >= actors.size())
          throw std::invalid_argument("a message to no actor");
        const auto& inboxes = actors[one.receiver].boxes->messages;
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
  py::class_<Ops, std::shared_ptr<Ops>>(m, "Ops", "See heteropp.simulator.engine.Ops.")
      .def(py::init([](std::vector<Op> table) { return Ops{std::move(table)}; }), py::arg("table"));

  py::class_<Boxes, std::shared_ptr<Boxes>>(m, "Boxes", "See heteropp.simulator.engine.Boxes.")
      .def(py::init(&make_boxes), py::kw_only(), py::arg("outboxes"), py::arg("messages"));

  py::class_<Actor>(m, "Actor", "A replica's table of ops; see heteropp.simulator.engine.Actor.")
      .def(py::init(&make_actor), py::kw_only(), py::arg("ops").none(false), py::arg("seconds"),
           py::arg("factors"), py::arg("boxes").none(false), py::arg("begin_s"));

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
