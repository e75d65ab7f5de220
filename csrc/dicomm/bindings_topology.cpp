// dicomm.topology's part of dicomm._dicomm.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "topology/topology.h"

namespace py = pybind11;
using namespace dicomm;

void bind_topology(py::module_& m) {
  py::class_<PciDevice>(m, "PciDevice", "One function on PCI.")
      .def_readonly("address", &PciDevice::address)
      .def_readonly("class_code", &PciDevice::class_code)
      .def_readonly("vendor", &PciDevice::vendor)
      .def_readonly("device", &PciDevice::device)
      .def_readonly("path", &PciDevice::path,
                    "From its host bridge down to itself; empty if hidden.")
      .def_readonly("numa_node", &PciDevice::numa_node, "-1: unknown.")
      .def_readonly("link_bytes_per_s", &PciDevice::link_bytes_per_s, "Each way; 0: unknown.");

  py::class_<Nic>(m, "Nic", "One port of one RDMA device.")
      .def_readonly("device", &Nic::device)
      .def_readonly("port", &Nic::port)
      .def_readonly("active", &Nic::active)
      .def_readonly("state", &Nic::state)
      .def_readonly("link_layer", &Nic::link_layer)
      .def_readonly("bytes_per_s", &Nic::bytes_per_s, "0: unknown.")
      .def_readonly("network", &Nic::network, "Its network interface; empty: none is seen.")
      .def_readonly("pci_address", &Nic::pci_address, "Empty: not on PCI.")
      .def_readonly("physical_function", &Nic::physical_function,
                    "PCI address of the card this is a virtual function of, if one.")
      .def_property_readonly("name", &Nic::name)
      .def("__repr__", [](const Nic& nic) { return "<Nic " + nic.name() + ">"; });

  py::class_<NumaNode>(m, "NumaNode")
      .def_readonly("id", &NumaNode::id)
      .def_readonly("cpus", &NumaNode::cpus)
      .def_readonly("distances", &NumaNode::distances);

  py::class_<Distance>(m, "Distance", "What lies between a chip and a NIC.")
      .def_property_readonly("nearness",
                             [](const Distance& distance) { return to_string(distance.nearness); })
      .def_readonly("numa_distance", &Distance::numa_distance)
      .def_readonly("hops", &Distance::hops)
      .def("nearer_than", &Distance::nearer_than, py::arg("other"));

  py::class_<Topology>(m, "Topology", "A node's chips and NICs and the PCIe tree between them.")
      .def_readonly("pci", &Topology::pci)
      .def_readonly("chips", &Topology::chips)
      .def_readonly("nics", &Topology::nics)
      .def_readonly("numa_nodes", &Topology::numa_nodes);

  m.def("discover", &discover, py::arg("sys_root") = "/sys",
        py::arg("chips") = std::vector<std::string>{});
  m.def("distance", &distance, py::arg("topology"), py::arg("chip"), py::arg("nic"));
  m.def("nics_for", &nics_for, py::arg("topology"), py::arg("chip"), py::arg("limit") = 8);
  m.def("nics_named", &nics_named, py::arg("topology"), py::arg("list"));
}
