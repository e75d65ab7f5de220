// The Python module dicomm._c10d; dicomm/distributed.py is its face.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "chip_memory.h"
#include "device_memory.h"
#include "mixed.h"

namespace py = pybind11;

namespace {

// vendor_of: a number for each rank's vendor; empty: collectives do not care for vendors. parent:
// a group whose connections this one shares, of which its ranks are `ranks`; an empty secret is the
// parent's.
c10::intrusive_ptr<dicomm::Backend> create(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    std::chrono::milliseconds timeout, const std::string& name, const std::string& rank_label,
    const std::string& secret, const std::string& strategy, const std::string& transport,
    const std::string& listen_address, const std::string& chip, const std::string& nics,
    const std::string& node, const std::vector<int>& vendor_of,
    c10::intrusive_ptr<c10d::Backend> native, const dicomm::Backend* parent,
    const std::vector<int>& ranks) {
  const auto shared_with = parent ? parent->communicator() : nullptr;
  dicomm::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.secret = secret.empty() && shared_with ? shared_with->secret() : secret;
  options.name = name;
  options.rank_label = rank_label;
  options.timeout = timeout;
  options.transport = dicomm::known_transport(transport);  // checked by distributed.py
  options.listen_address = listen_address;
  options.chip = chip;
  options.nics = nics;
  options.node = node;
  const auto parsed = dicomm::parse_strategy(strategy);
  if (vendor_of.empty())
    return c10::make_intrusive<dicomm::Backend>(std::move(store), options, parsed, shared_with,
                                                ranks);
  return c10::make_intrusive<dicomm::MixedBackend>(std::move(store), options, parsed, shared_with,
                                                   ranks, vendor_of, std::move(native));
}

void set_device_clock(const std::string& device_type, std::uintptr_t ready_at_ns,
                      std::uintptr_t wait_until_ns) {
  dicomm::set_device_clock(c10::Device(device_type).type(),
                           {reinterpret_cast<std::int64_t (*)(std::int32_t)>(ready_at_ns),
                            reinterpret_cast<void (*)(std::int32_t, std::int64_t)>(wait_until_ns)});
}

bool share_chip_memory(const std::string& device_type, const std::string& library) {
  return dicomm::share_chip_memory(c10::Device(device_type).type(), library);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");  // defines the classes that ours derive from
  module.def("transport_names", &dicomm::transport_names);
  py::class_<dicomm::Backend, c10d::Backend, c10::intrusive_ptr<dicomm::Backend>>(module, "Backend")
      .def(py::init(&create), py::kw_only(), py::arg("store"), py::arg("rank"),
           py::arg("world_size"), py::arg("timeout"), py::arg("name"), py::arg("rank_label"),
           py::arg("secret"), py::arg("strategy"), py::arg("transport"), py::arg("listen_address"),
           py::arg("chip") = "", py::arg("nics") = "", py::arg("node") = "",
           py::arg("vendor_of") = std::vector<int>{}, py::arg("native").none(true) = py::none(),
           py::arg("parent").none(true) = py::none(), py::arg("ranks") = std::vector<int>{},
           py::call_guard<py::gil_scoped_release>())
      .def("set_link", &dicomm::Backend::set_link)
      .def("bytes_sent", &dicomm::Backend::bytes_sent)
      .def(
          "monitored_barrier",
          [](dicomm::Backend& self, std::chrono::milliseconds timeout, bool wait_all_ranks) {
            c10d::BarrierOptions options;
            options.timeout = timeout;
            self.monitoredBarrier(options, wait_all_ranks);
          },
          py::call_guard<py::gil_scoped_release>());
  // Made by Backend(vendor_of=...); named here so that Python knows it for a Backend.
  py::class_<dicomm::MixedBackend, dicomm::Backend, c10::intrusive_ptr<dicomm::MixedBackend>>(
      module, "MixedBackend");
  module.def("set_device_clock", &set_device_clock);
  module.def("share_chip_memory", &share_chip_memory);
  module.def("device_memory_functions", [] {
    return py::make_tuple(reinterpret_cast<std::uintptr_t>(&dicomm_memory_taken),
                          reinterpret_cast<std::uintptr_t>(&dicomm_memory_returned));
  });
}
