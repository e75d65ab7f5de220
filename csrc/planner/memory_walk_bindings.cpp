// What a rank holds and what waits for it, for heteropp/cost/memory_walk.py and
// heteropp/schedule/inboxes.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "memory_walk.h"
#include "most_waiting.h"

namespace py = pybind11;

namespace planner {

namespace {

constexpr std::size_t kFigures = sizeof(MinistageBytes) / sizeof(std::int64_t);
using Figures = std::array<std::int64_t, kFigures>;

MinistageBytes make_ministage(const Figures& f) {
  return {f[0], f[1], f[2],  f[3],  f[4],  f[5],  f[6],  f[7],
          f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15]};
}

void check(const WalkedStage& stage, const std::vector<Coded>& table) {
  int count = static_cast<int>(stage.ministages.size());
  if (stage.following.size() != stage.ministages.size() || stage.gathers < 1 || !count)
    throw std::invalid_argument("a stage without ministages, or of unlike numbers of them");
  for (auto [kind, i, k] : table)
    if (kind < 0 || kind > kStep || i < 0 || k < 0 || k >= count)
      throw std::invalid_argument("an action of a ministage that is not there");
  for (const auto& by_slice : stage.ministages)
    if (by_slice.empty() || by_slice.size() != stage.ministages[0].size())
      throw std::invalid_argument("ministages of unlike numbers of slices");
  for (int k : stage.following)
    if (k >= count) throw std::invalid_argument("a ministage that is not there");
  for (auto [kind, k, ahead] : stage.ahead)
    if (kind < 0 || kind > kStep || k < 0 || k >= count)
      throw std::invalid_argument("a receive of a ministage that is not there");
}

}  // namespace

void bind_memory_walk(py::module_& m) {
  py::class_<WalkedBytes>(m, "WalkedBytes", "What a rank holds over a step.")
      .def_readonly("before", &WalkedBytes::before)
      .def_readonly("during", &WalkedBytes::during, "By action: the most bytes while it runs.")
      .def_readonly("after", &WalkedBytes::after, "By action: the bytes that are held then.")
      .def_readonly("host", &WalkedBytes::host, "The most bytes in host memory.")
      .def_property_readonly(
          "most",
          [](const WalkedBytes& walked) {
            const Held& h = walked.most;
            return std::array{h.parameters, h.gradients,  h.kept,
                              h.working,    h.recomputed, h.boundary};
          },
          "Parameters, gradients, kept, working, recomputed and boundary, when most are held.");

  m.def(
      "walk_memory",
      [](const std::vector<Coded>& table, const std::vector<std::vector<Figures>>& ministages,
         std::vector<int> following, std::vector<Coded> ahead, std::int64_t fixed_bytes,
         int gathers, int dp, int zero_stage, int under_way, bool keeps, bool offload,
         bool in_place_update, bool overlap) {
        WalkedStage stage{{},
                          std::move(following),
                          std::move(ahead),
                          fixed_bytes,
                          gathers,
                          dp,
                          zero_stage,
                          under_way,
                          keeps,
                          offload,
                          in_place_update,
                          overlap};
        for (const std::vector<Figures>& by_slice : ministages) {
          stage.ministages.emplace_back();
          for (const Figures& figures : by_slice)
            stage.ministages.back().push_back(make_ministage(figures));
        }
        check(stage, table);
        return walk_memory(stage, table);
      },
      py::arg("table"), py::kw_only(), py::arg("ministages"), py::arg("following"),
      py::arg("ahead"), py::arg("fixed_bytes"), py::arg("gathers"), py::arg("dp"),
      py::arg("zero_stage"), py::arg("under_way"), py::arg("keeps"), py::arg("offload"),
      py::arg("in_place_update"), py::arg("overlap"));

  m.def("most_waiting", &most_waiting, py::arg("tables"), py::arg("between"),
        "(stage, ministage, kind of receive, most tensors) of each inbox.");
}

}  // namespace planner
