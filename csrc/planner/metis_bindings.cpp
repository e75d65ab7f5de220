// heteropp._planner: the exact search on Metis's cost, for heteropp/search/metis_exact.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "metis.h"

namespace py = pybind11;

namespace planner {

void bind_metis(py::module_& m) {
  using namespace metis;

  py::class_<metis::Profile>(m, "MetisProfile")
      .def(py::init([](const Sums& seconds, double between_s, const Sums& held_bytes,
                       const Sums& divided_bytes, double capacity_bytes) {
             return metis::Profile{seconds, between_s, held_bytes, divided_bytes, capacity_bytes};
           }),
           py::kw_only(), py::arg("seconds"), py::arg("between_s"), py::arg("held_bytes"),
           py::arg("divided_bytes"), py::arg("capacity_bytes"));

  py::class_<metis::ChipType>(m, "MetisChipType")
      .def(py::init([](double intra_bytes_per_s, double inter_bytes_per_s,
                       const std::vector<double>& collective_bytes_per_s, double update_s,
                       const std::map<std::pair<int, int>, metis::Profile>& profiles) {
             return metis::ChipType{intra_bytes_per_s, inter_bytes_per_s, collective_bytes_per_s,
                                    update_s, profiles};
           }),
           py::kw_only(), py::arg("intra_bytes_per_s"), py::arg("inter_bytes_per_s"),
           py::arg("collective_bytes_per_s"), py::arg("update_s"), py::arg("profiles"));

  py::class_<metis::Problem>(m, "MetisProblem")
      .def(py::init([](int layers, int global_batch, int largest_batch,
                       const std::vector<metis::ChipType>& types,
                       const std::vector<std::pair<int, int>>& nodes,
                       const std::vector<std::vector<int>>& orders,
                       const std::vector<int>& micro_batches, const std::vector<int>& degrees,
                       const Sums& parameter_bytes, double activation_bytes, double batch_s,
                       bool pooled, double busy_s) {
             metis::Problem problem{
                 layers,  global_batch,    largest_batch,    types,   {},     orders, micro_batches,
                 degrees, parameter_bytes, activation_bytes, batch_s, pooled, busy_s};
             for (const auto& [type, chips] : nodes) problem.nodes.push_back({type, chips});
             return problem;
           }),
           py::kw_only(), py::arg("layers"), py::arg("global_batch"), py::arg("largest_batch"),
           py::arg("types"), py::arg("nodes"), py::arg("orders"), py::arg("micro_batches"),
           py::arg("degrees"), py::arg("parameter_bytes"), py::arg("activation_bytes"),
           py::arg("batch_s"), py::arg("pooled"), py::arg("busy_s"));

  py::class_<metis::Solution>(m, "MetisSolution")
      .def_readonly("cost_s", &metis::Solution::cost_s, "Infinite: no plan fits.")
      .def_readonly("lower_bound_s", &metis::Solution::lower_bound_s)
      .def_readonly("order", &metis::Solution::order)
      .def_readonly("micro_batches", &metis::Solution::micro_batches)
      .def_readonly("steps", &metis::Solution::steps, "Dynamic programmes solved.")
      .def_property_readonly(
          "stages",
          [](const metis::Solution& solution) {
            std::vector<std::array<int, 3>> stages;
            for (const metis::Stage& stage : solution.stages) {
              stages.push_back({stage.chips, stage.tp, stage.layers});
            }
            return stages;
          },
          "(chips, tp, layers) of each stage, first to last.");

  m.def("solve_metis", &metis::solve, py::arg("problem"), py::arg("most_steps"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace planner
