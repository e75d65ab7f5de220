#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "division.h"

namespace py = pybind11;

namespace planner {

void bind_division(py::module_& m) {
  m.def(
      "divide",
      [](const std::vector<double>& power, const std::vector<double>& memory,
         const Counts& everything, int groups, int micro_batches, double least_power,
         double least_memory) {
        if (power.size() != everything.size() || memory.size() != everything.size())
          throw std::invalid_argument("power, memory and counts must be of the same types");
        if (groups < 1 || micro_batches < 1)
          throw std::invalid_argument("groups and micro-batches must be at least 1");
        const py::gil_scoped_release release;
        const Division division =
            divide({power, memory}, everything, groups, micro_batches, least_power, least_memory);
        return std::pair(division.groups, division.steps);
      },
      py::arg("power"), py::arg("memory"), py::arg("everything"), py::arg("groups"),
      py::arg("micro_batches"), py::arg("least_power"), py::arg("least_memory"),
      "Divides counted units into groups of more than so much effective power each; gives the "
      "counts of each group, None where there is no such division, and the groups tried.");
}

}  // namespace planner
