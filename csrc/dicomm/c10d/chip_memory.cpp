#include "chip_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "core/host.h"
#include "cuda_memory.h"
#include "ditorch/abi/runtime.h"

namespace dicomm {

namespace {

// Of a library that implements ditorch's runtime ABI. The copies go through torch's allocator,
// which knows the vendor's stream behind torch's.
class VendorMemory final : public ChipMemory {
 public:
  VendorMemory(c10::DeviceType type, const ditorch_runtime& runtime)
      : type_(type), runtime_(runtime) {}

  MemoryHandle export_from(c10::DeviceIndex device, const void* address) const override {
    ditorch_memory_handle words{};
    words.struct_size = sizeof words;
    check(runtime_.memory_export(device, address, &words), "export memory");
    MemoryHandle handle;
    std::copy(std::begin(words.allocation), std::end(words.allocation), handle.allocation.begin());
    handle.offset_bytes = words.offset_bytes;
    return handle;
  }

  void* import(c10::DeviceIndex device, const MemoryHandle& handle) const override {
    ditorch_memory_handle words{};
    words.struct_size = sizeof words;
    std::copy(handle.allocation.begin(), handle.allocation.end(), words.allocation);
    words.offset_bytes = handle.offset_bytes;
    void* imported = nullptr;
    check(runtime_.memory_import(device, &words, &imported), "import memory");
    return imported;
  }

  void release(c10::DeviceIndex device, void* imported) const override {
    check(runtime_.memory_import_release(device, imported), "release imported memory");
  }

  void copy(c10::DeviceIndex, void* to, const void* from, std::size_t bytes) const override {
    c10::GetAllocator(type_)->copy_data(to, from, bytes);
  }

 private:
  void check(ditorch_status status, const char* action) const {
    TORCH_CHECK(status == DITORCH_OK, "dicomm: the chip failed to ", action, ": ",
                runtime_.last_error());
  }

  const c10::DeviceType type_;
  const ditorch_runtime runtime_;
};

// Of the one vendor whose chip this process is.
struct SharedMemory {
  c10::DeviceType type;
  std::unique_ptr<ChipMemory> memory;
};

std::mutex shared_memory_mutex;
// Never destroyed: messages may outlive every static.
SharedMemory* shared_memory = nullptr;

// The library's table, with what it lacks, being older than the ABI, as absent.
ditorch_runtime table_of(const std::string& library) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK_VALUE(opened, "dicomm: the vendor library does not load: ", dlerror());
  const auto entry =
      reinterpret_cast<ditorch_vendor_runtime_fn>(dlsym(opened, "ditorch_vendor_runtime"));
  const ditorch_runtime* const given = entry ? entry(DITORCH_RUNTIME_ABI_VERSION) : nullptr;
  TORCH_CHECK_VALUE(given && given->last_error, "dicomm: ", library, " does not speak ditorch's ",
                    "runtime ABI version ", DITORCH_RUNTIME_ABI_VERSION);
  ditorch_runtime table{};
  std::memcpy(&table, given, std::min(given->struct_size, sizeof table));
  return table;
}

// Null: the library does not implement these optional entries.
std::unique_ptr<ChipMemory> memory_of_library(c10::DeviceType type, const std::string& library) {
  const ditorch_runtime table = table_of(library);
  if (!table.memory_export || !table.memory_import || !table.memory_import_release) return nullptr;
  return std::make_unique<VendorMemory>(type, table);
}

}  // namespace

bool share_chip_memory(c10::DeviceType type, const std::string& library) {
  std::unique_ptr<ChipMemory> memory =
      library.empty() ? cuda_memory(type) : memory_of_library(type, library);
  if (!memory) return false;
  std::lock_guard lock(shared_memory_mutex);
  TORCH_CHECK_VALUE(!shared_memory || shared_memory->type == type, "dicomm: ",
                    c10::DeviceTypeName(shared_memory ? shared_memory->type : type, true),
                    " shares its memory already; one process is one chip of one vendor");
  if (!shared_memory) shared_memory = new SharedMemory{type, std::move(memory)};
  return true;
}

const ChipMemory* chip_memory(c10::DeviceType type) {
  std::lock_guard lock(shared_memory_mutex);
  return shared_memory && shared_memory->type == type ? shared_memory->memory.get() : nullptr;
}

std::string chip_memory_domain() {
  std::lock_guard lock(shared_memory_mutex);
  return shared_memory ? c10::DeviceTypeName(shared_memory->type, true) + "@" + host_id() : "";
}

}  // namespace dicomm
