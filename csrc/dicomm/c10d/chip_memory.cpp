#include "chip_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

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
    handle.process = ::getpid();
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

  std::optional<Dmabuf> export_dmabuf(c10::DeviceIndex device, const void* address,
                                      std::size_t bytes) const override {
    if (!runtime_.memory_peer_handle) return std::nullopt;
    ditorch_peer_handle handle{};
    handle.struct_size = sizeof handle;
    const auto status =
        runtime_.memory_peer_handle(device, const_cast<void*>(address), bytes, &handle);
    if (status != DITORCH_OK || handle.kind != DITORCH_PEER_DMABUF || handle.fd < 0)
      return std::nullopt;
    return Dmabuf{Fd(handle.fd), handle.offset_bytes};
  }

  // Whether another process's chip reaches its memory.
  bool is_shared() const {
    return runtime_.memory_export && runtime_.memory_import && runtime_.memory_import_release;
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
  bool is_shared;  // with chips of other processes
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

// Without memory where nothing is known of the chip.
SharedMemory memory_of(c10::DeviceType type, const std::string& library) {
  if (library.empty()) {
    auto memory = cuda_memory(type);
    const bool is_shared = memory != nullptr;
    return {type, std::move(memory), is_shared};
  }
  auto memory = std::make_unique<VendorMemory>(type, table_of(library));
  const bool is_shared = memory->is_shared();
  return {type, std::move(memory), is_shared};
}

}  // namespace

bool share_chip_memory(c10::DeviceType type, const std::string& library) {
  SharedMemory found = memory_of(type, library);
  if (!found.memory) return false;
  std::lock_guard lock(shared_memory_mutex);
  TORCH_CHECK_VALUE(!shared_memory || shared_memory->type == type, "dicomm: ",
                    c10::DeviceTypeName(shared_memory ? shared_memory->type : type, true),
                    " shares its memory already; one process is one chip of one vendor");
  if (!shared_memory) shared_memory = new SharedMemory(std::move(found));
  return shared_memory->is_shared;
}

std::optional<Dmabuf> export_chip_dmabuf(c10::DeviceIndex device, std::uint64_t address,
                                         std::uint64_t bytes) noexcept {
  const ChipMemory* memory = nullptr;
  {
    std::lock_guard lock(shared_memory_mutex);
    if (shared_memory) memory = shared_memory->memory.get();
  }
  if (!memory) return std::nullopt;
  try {
    return memory->export_dmabuf(device, reinterpret_cast<const void*>(address), bytes);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

const ChipMemory* chip_memory(c10::DeviceType type) {
  std::lock_guard lock(shared_memory_mutex);
  const bool is_known = shared_memory && shared_memory->type == type;
  return is_known && shared_memory->is_shared ? shared_memory->memory.get() : nullptr;
}

std::string chip_memory_domain() {
  std::lock_guard lock(shared_memory_mutex);
  if (!shared_memory || !shared_memory->is_shared) return "";
  return c10::DeviceTypeName(shared_memory->type, true) + "@" + host_id();
}

}  // namespace dicomm
