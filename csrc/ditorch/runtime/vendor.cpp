#include "runtime/vendor.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

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

// The vendor's table with what it does not have yet, being older than ditorch, as absent. Null if
// it is not a table of this version.
template <typename Table>
const Table* complete(const Table* given, uint32_t version) {
  constexpr size_t kHeader_bytes = offsetof(Table, struct_size) + sizeof(size_t);
  if (!given || given->abi_version != version || given->struct_size < kHeader_bytes) return nullptr;
  auto* table = new Table{};  // for the life of the process, like the library
  std::memcpy(table, given, std::min(given->struct_size, sizeof(Table)));
  return table;
}

void refuse_incomplete(const std::string& path, const ditorch_runtime& runtime) {
  const std::pair<const char*, bool> required[] = {
#define ENTRY(name) {#name, runtime.name != nullptr}
      ENTRY(last_error),         ENTRY(device_count),      ENTRY(device_properties),
      ENTRY(device_synchronize), ENTRY(memory_allocate),   ENTRY(memory_free),
      ENTRY(memory_info),        ENTRY(memory_copy),       ENTRY(stream_create),
      ENTRY(stream_destroy),     ENTRY(stream_query),      ENTRY(stream_synchronize),
      ENTRY(event_create),       ENTRY(event_destroy),     ENTRY(event_record),
      ENTRY(event_query),        ENTRY(event_synchronize), ENTRY(stream_wait_event),
      ENTRY(event_elapsed_ns),
#undef ENTRY
  };
  for (const auto& [name, is_there] : required) {
    TORCH_CHECK(is_there, "the vendor library ", path, " has no ", name,
                ", which ditorch's runtime ABI requires");
  }
}

// torch writes the name into device strings ("emuchip:0") and attributes (torch.emuchip).
void refuse_name(const std::string& path, const std::string& name) {
  const bool is_word = !name.empty() && name[0] >= 'a' && name[0] <= 'z' &&
                       std::all_of(name.begin(), name.end(), [](char c) {
                         return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
                       });
  TORCH_CHECK(is_word, "the vendor library ", path, " calls its device '", name,
              "', expected a name of lower-case letters, digits and underscores");
  bool is_taken = name == "device";
  try {
    c10::Device taken(name);
    is_taken = true;
  } catch (const c10::Error&) {
  }
  TORCH_CHECK(!is_taken, "the vendor library ", path, " calls its device '", name,
              "', which torch already uses for another");
}

ditorch_device_properties describe(const Vendor& found, int32_t device) {
  ditorch_device_properties properties{};
  properties.struct_size = sizeof(properties);
  const auto status = found.runtime->device_properties(device, &properties);
  TORCH_CHECK(status == DITORCH_OK, "the vendor library ", found.path, " cannot describe chip ",
              device, ": ", found.runtime->last_error());
  for (auto* text : {&properties.vendor, &properties.chip_type, &properties.library}) {
    (*text)[sizeof(*text) - 1] = '\0';
  }
  return properties;
}

}  // namespace

const Vendor& vendor() { return slot(); }

bool host_reaches(c10::DeviceIndex device) {
  return vendor().devices[static_cast<size_t>(device)].host_accessible != 0;
}

void load_vendor(const std::string& path) {
  TORCH_CHECK(slot().runtime == nullptr, "ditorch already drives the vendor library ", slot().path,
              "; one process is one chip of one vendor");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "the vendor library ", path, " does not load: ", dlerror());

  Vendor found;
  found.path = path;
  if (auto entry = symbol<ditorch_vendor_runtime_fn>(library, "ditorch_vendor_runtime")) {
    found.runtime = complete(entry(DITORCH_RUNTIME_ABI_VERSION), DITORCH_RUNTIME_ABI_VERSION);
  }
  TORCH_CHECK(found.runtime, "the vendor library ", path,
              " does not speak ditorch's runtime ABI version ", DITORCH_RUNTIME_ABI_VERSION);
  refuse_incomplete(path, *found.runtime);
  if (auto entry = symbol<ditorch_vendor_operators_fn>(library, "ditorch_vendor_operators")) {
    found.operators = complete(entry(DITORCH_OPERATORS_ABI_VERSION), DITORCH_OPERATORS_ABI_VERSION);
    TORCH_CHECK(found.operators, "the vendor library ", path,
                " does not speak ditorch's operator ABI version ", DITORCH_OPERATORS_ABI_VERSION);
  }

  int32_t count = 0;
  auto status = found.runtime->device_count(&count);
  TORCH_CHECK(status == DITORCH_OK, "the vendor library ", path,
              " cannot count its chips: ", found.runtime->last_error());
  TORCH_CHECK(count > 0, "the vendor library ", path, " finds no chip on this machine");
  for (int32_t device = 0; device < count; ++device) {
    found.devices.push_back(describe(found, device));
  }
  refuse_name(path, found.devices.front().library);
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
