// heteropp._planner: the exact search, for heteropp/search, the simulator's engine, and the walk
// through a rank's memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "chain.h"

namespace py = pybind11;
using namespace planner;

namespace planner {
void bind_division(py::module_& m);     // division_bindings.cpp
void bind_engine(py::module_& m);       // engine_bindings.cpp
void bind_memory_walk(py::module_& m);  // memory_walk_bindings.cpp
void bind_metis(py::module_& m);        // metis_bindings.cpp
}  // namespace planner

namespace {

using Lines = std::vector<std::array<double, 2>>;

std::vector<Line> make_lines(const Lines& given) {
  std::vector<Line> lines;
  for (const auto& [fixed, per_layer] : given) lines.push_back({fixed, per_layer});
  return lines;
}

using Workings = std::vector<std::pair<std::array<double, 4>, std::vector<double>>>;

Cost make_cost(const Lines& time_s, const Lines& update_s, const Workings& working,
               const Lines& alone, const Lines& measured_s) {
  Cost cost;
  cost.time_s = make_lines(time_s);
  cost.update_s = make_lines(update_s);
  for (const auto& [plane, boundary] : working) {
    if (boundary.empty()) throw std::invalid_argument("no boundary");
    cost.working.push_back({{plane[0], plane[1], plane[2], plane[3]}, boundary});
  }
  cost.alone = make_lines(alone);
  cost.measured_s = measured_s;
  return cost;
}

void check(const Problem& problem) {
  for (const ChipType& type : problem.types) {
    if (type.chips < 1) throw std::invalid_argument("a chip type has no chips");
    for (const Choice& choice : type.choices) {
      if (choice.chips < 1 || choice.align < 1) throw std::invalid_argument("an empty stage");
      if (choice.places.empty()) throw std::invalid_argument("a choice without places");
      for (std::uint8_t place : choice.places) {
        if (place >= choice.costs.size()) throw std::invalid_argument("no costs of a place");
      }
    }
    for (const Lane& lane : type.lanes) {
      if (lane.choices.empty()) throw std::invalid_argument("a lane without choices");
      for (int choice : lane.choices) {
        if (choice < 0 || static_cast<std::size_t>(choice) >= type.choices.size()) {
          throw std::invalid_argument("a lane names no choice of its type");
        }
      }
    }
  }
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "The exact search over pipelines; heteropp.search.exact describes it.";

  py::class_<Cost>(m, "Cost", "What a stage costs as a function of its layers.")
      .def(py::init(&make_cost), py::kw_only(), py::arg("time_s"), py::arg("update_s"),
           py::arg("working"), py::arg("alone"), py::arg("measured_s"));

  py::class_<Choice>(m, "Choice", "One way to run a stage on chips of one type.")
      .def(py::init([](int chips, int align, const std::vector<std::array<Cost, kKinds>>& costs,
                       const std::vector<std::uint8_t>& places) {
             return Choice{chips, align, costs, places};
           }),
           py::kw_only(), py::arg("chips"), py::arg("align"), py::arg("costs"), py::arg("places"));

  py::class_<Lane>(m, "Lane", "What the stages of one chip type choose from together.")
      .def(py::init(
               [](const std::vector<int>& choices, bool alike) { return Lane{choices, alike}; }),
           py::kw_only(), py::arg("choices"), py::arg("alike"));

  py::class_<ChipType>(m, "ChipType")
      .def(py::init([](int chips, double capacity_bytes, const std::vector<Choice>& choices,
                       const std::vector<Lane>& lanes) {
             return ChipType{chips, capacity_bytes, choices, lanes};
           }),
           py::kw_only(), py::arg("chips"), py::arg("capacity_bytes"), py::arg("choices"),
           py::arg("lanes"));

  py::class_<Problem>(m, "Problem")
      .def(py::init([](int layers, double micro_batches, double alpha,
                       const std::vector<double>& in_flight, int stages,
                       const std::vector<ChipType>& types) {
             Problem problem{layers, micro_batches, alpha, in_flight, stages, types};
             check(problem);
             return problem;
           }),
           py::kw_only(), py::arg("layers"), py::arg("micro_batches"), py::arg("alpha"),
           py::arg("in_flight"), py::arg("stages"), py::arg("types"));

  py::class_<Solution>(m, "Solution")
      .def_readonly("cost_s", &Solution::cost_s, "Infinite: no pipeline costs at most the cutoff.")
      .def_readonly("lower_bound_s", &Solution::lower_bound_s)
      .def_readonly("steps", &Solution::steps, "Stages tried.")
      .def_property_readonly(
          "stages",
          [](const Solution& solution) {
            std::vector<std::array<int, 3>> stages;
            for (const StageChoice& stage : solution.stages) {
              stages.push_back({stage.type, stage.choice, stage.layers});
            }
            return stages;
          },
          "(chip type, choice, layers) of each stage, first to last.");

  m.def("solve", &solve, py::arg("problem"), py::arg("cutoff_s"), py::arg("width"),
        py::call_guard<py::gil_scoped_release>());
  bind_division(m);
  bind_engine(m);
  bind_memory_walk(m);
  bind_metis(m);
}
