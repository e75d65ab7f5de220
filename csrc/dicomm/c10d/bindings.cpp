// The Python module dicomm._c10d; dicomm/distributed.py is its face.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace py = pybind11;

namespace {

c10::intrusive_ptr<dicomm::Backend> create(c10::intrusive_ptr<c10d::Store> store, int rank,
                                           int world_size, std::chrono::milliseconds timeout,
                                           const std::string& name, const std::string& rank_label,
                                           const std::string& secret, const std::string& strategy) {
  dicomm::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.secret = secret;
  options.name = name;
  options.rank_label = rank_label;
  options.timeout = timeout;
  return c10::make_intrusive<dicomm::Backend>(std::move(store), options,
                                              dicomm::parse_strategy(strategy));
}

void set_device_clock(const std::string& device_type, std::uintptr_t ready_at_ns,
                      std::uintptr_t wait_until_ns) {
  dicomm::set_device_clock(c10::Device(device_type).type(),
                           {reinterpret_cast<std::int64_t (*)(std::int32_t)>(ready_at_ns),
                            reinterpret_cast<void (*)(std::int32_t, std::int64_t)>(wait_until_ns)});
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");  // defines the classes that ours derive from
  py::class_<dicomm::Backend, c10d::Backend, c10::intrusive_ptr<dicomm::Backend>>(module, "Backend")
      .def(py::init(&create), py::kw_only(), py::arg("store"), py::arg("rank"),
           py::arg("world_size"), py::arg("timeout"), py::arg("name"), py::arg("rank_label"),
           py::arg("secret"), py::arg("strategy"), py::call_guard<py::gil_scoped_release>())
      .def("set_link", &dicomm::Backend::set_link)
      .def("bytes_sent", &dicomm::Backend::bytes_sent);
  module.def("set_device_clock", &set_device_clock);
}
