#include "runtime/vendor.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdlib>

namespace ditorch {
namespace {

Vendor& slot() {
  static auto* loaded = new Vendor();  // never destroyed: tensors may outlive every static
  return *loaded;
}

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

const Vendor& vendor() { return slot(); }

void load_vendor(const std::string& path) {
  TORCH_CHECK(slot().runtime == nullptr, "ditorch already drives the vendor library ", slot().path,
              "; one process is one chip of one vendor");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "the vendor library ", path, " does not load: ", dlerror());

  Vendor found;
  found.path = path;
  auto runtime_entry = symbol<ditorch_vendor_runtime_fn>(library, "ditorch_vendor_runtime");
  if (runtime_entry) found.runtime = runtime_entry(DITORCH_RUNTIME_ABI_VERSION);
  TORCH_CHECK(found.runtime && found.runtime->abi_version == DITORCH_RUNTIME_ABI_VERSION &&
                  found.runtime->struct_size >= sizeof(ditorch_runtime),
              "the vendor library ", path, " does not speak ditorch's runtime ABI version ",
              DITORCH_RUNTIME_ABI_VERSION);
  auto operators_entry = symbol<ditorch_vendor_operators_fn>(library, "ditorch_vendor_operators");
  if (operators_entry) {
    found.operators = operators_entry(DITORCH_OPERATORS_ABI_VERSION);
    TORCH_CHECK(found.operators && found.operators->struct_size >= sizeof(ditorch_operators),
                "the vendor library ", path, " does not speak ditorch's operator ABI version ",
                DITORCH_OPERATORS_ABI_VERSION);
  }

  int32_t count = 0;
  auto status = found.runtime->device_count(&count);
  TORCH_CHECK(status == DITORCH_OK, "the vendor library ", path,
              " cannot count its chips: ", found.runtime->last_error());
  TORCH_CHECK(count > 0, "the vendor library ", path, " finds no chip on this machine");
  for (int32_t device = 0; device < count; ++device) {
    ditorch_device_properties properties{};
    properties.struct_size = sizeof(properties);
    status = found.runtime->device_properties(device, &properties);
    TORCH_CHECK(status == DITORCH_OK, "the vendor library ", path, " cannot describe chip ", device,
                ": ", found.runtime->last_error());
    TORCH_CHECK(properties.host_accessible, "the chip ", properties.chip_type, " of vendor ",
                properties.vendor,
                " keeps its memory from the host; ditorch needs memory that the host can reach, "
                "because operators without a vendor kernel run there");
    found.devices.push_back(properties);
  }
  slot() = std::move(found);
}

void check(ditorch_status status, const char* action) {
  if (status == DITORCH_OK) return;
  const char* reason = vendor().runtime->last_error();
  if (!reason || !*reason) reason = "the vendor gave no reason";
  TORCH_CHECK_WITH(OutOfMemoryError, status != DITORCH_OUT_OF_MEMORY, action, ": ", reason);
  TORCH_CHECK(false, "the chip failed to ", action, ": ", reason);
}

std::string describe_chip(c10::DeviceIndex device) {
  const auto& properties = vendor().devices.at(device);
  const char* rank = std::getenv("RANK");
  return c10::str("chip ", properties.chip_type, " of vendor ", properties.vendor, " (",
                  properties.library, ":", static_cast<int>(device), rank ? ", rank " : "",
                  rank ? rank : "", ")");
}

}  // namespace ditorch
