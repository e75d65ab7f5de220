// The Python face of the device layer: ditorch._ditorch. Everything public is in ditorch/.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "ops/attention.h"
#include "ops/operator.h"
#include "ops/register.h"
#include "ops/strict.h"
#include "profiler/kernels.h"
#include "runtime/allocator.h"
#include "runtime/autograd_rest.h"
#include "runtime/device.h"
#include "runtime/device_clock.h"
#include "runtime/generator.h"
#include "runtime/memory_watch.h"
#include "runtime/missing_dtypes.h"
#include "runtime/stream.h"
#include "runtime/unified_name.h"
#include "runtime/vendor.h"

namespace py = pybind11;

namespace ditorch {
namespace {

void load(const std::string& path) {
  load_vendor(path);
  register_allocator();
  register_guard();
  register_hooks();
  register_operators();
  register_autocast();
  register_profiler();
}

py::dict properties(c10::DeviceIndex device) {
  const auto& chip = vendor().devices.at(device);
  py::dict result;
  result["vendor"] = chip.vendor;
  result["chip_type"] = chip.chip_type;
  result["library"] = chip.library;
  result["memory_bytes"] = chip.memory_bytes;
  result["host_accessible"] = static_cast<bool>(chip.host_accessible);
  result["nic_accessible"] = static_cast<bool>(chip.nic_accessible);
  return result;
}

// (kind, address, fd, offset in bytes), or None on a chip whose memory no NIC reaches.
py::object peer_handle(c10::DeviceIndex device, uintptr_t address, size_t bytes) {
  const auto& runtime = *vendor().runtime;
  if (!runtime.memory_peer_handle) return py::none();
  ditorch_peer_handle handle{};
  handle.struct_size = sizeof(handle);
  const auto status =
      runtime.memory_peer_handle(device, reinterpret_cast<void*>(address), bytes, &handle);
  if (status == DITORCH_NOT_IMPLEMENTED) return py::none();
  check(status, "make its memory known to a NIC");
  return py::make_tuple(handle.kind, reinterpret_cast<uintptr_t>(handle.pointer), handle.fd,
                        handle.offset_bytes);
}

// (elapsed, busy, lost) seconds, or None on a chip that keeps no such account.
py::object pacing(c10::DeviceIndex device) {
  const auto& runtime = *vendor().runtime;
  if (!runtime.pacing) return py::none();
  ditorch_pacing account{};
  account.struct_size = sizeof(account);
  check(runtime.pacing(device, &account), "report its pacing");
  return py::make_tuple(account.elapsed_s, account.busy_s, account.lost_s);
}

void pacing_reset(c10::DeviceIndex device) {
  const auto& runtime = *vendor().runtime;
  if (runtime.pacing_reset) check(runtime.pacing_reset(device), "reset its pacing");
}

py::object device_clock() {
  const auto& runtime = *vendor().runtime;
  if (!runtime.stream_ready_at_ns || !runtime.stream_wait_until_ns) return py::none();
  return py::make_tuple(reinterpret_cast<int64_t>(&ditorch_ready_at_ns),
                        reinterpret_cast<int64_t>(&ditorch_wait_until_ns));
}

}  // namespace

PYBIND11_MODULE(_ditorch, m) {
  m.def("load", &load);
  m.def("is_loaded", [] { return vendor().runtime != nullptr; });
  m.def("unify_device_name", &unify_device_name);
  m.def("unify_cuda_name", &unify_cuda_name);
  m.def("let_autograd_rest", &let_autograd_rest, py::call_guard<py::gil_scoped_release>());
  m.def("substitute_dtypes", &substitute_dtypes);
  m.def("refuse_dtypes", &refuse_dtypes);
  m.def("device_count", [] { return vendor().devices.size(); });
  m.def("current_device", &current_device);
  m.def("set_device", [](c10::DeviceIndex device) { exchange_device(device); });
  m.def("synchronize", [](c10::DeviceIndex device) {
    py::gil_scoped_release released;
    check(vendor().runtime->device_synchronize(device), "synchronize");
  });
  m.def("properties", &properties);
  m.def("default_generator", &default_generator);
  m.def("fallback_counts", &fallback_counts);
  m.def("reset_fallback_counts", &reset_fallback_counts);
  m.def("set_strict", &set_strict);
  m.def("set_module", &set_module);
  m.def("host_runs_here", [] { return host_runs_here; });
  m.def("kernel_counts", &kernel_counts);
  m.def("has_attention", [](bool apart, bool soft_cap, bool dropout) {
    return attention::vendor_has({apart, soft_cap, dropout});
  });
  m.def("peer_handle", &peer_handle);
  m.def("pacing", &pacing);
  m.def("pacing_reset", &pacing_reset);
  m.def("device_clock", &device_clock);
  m.def("watch_memory", [](std::uintptr_t taken, std::uintptr_t returned) {
    watch_memory(reinterpret_cast<MemoryFunction>(taken),
                 reinterpret_cast<MemoryFunction>(returned));
  });
}

}  // namespace ditorch
