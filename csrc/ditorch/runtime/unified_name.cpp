// Every device string torch meets, in Python or in C++, goes through one exported constructor of
// libc10, c10::Device::Device(const std::string&). The other torch libraries call it through a
// slot of their global offset table; those slots are pointed at `make_device` below, which
// rewrites "device" and "device:N", "cuda" and "cuda:N" too once asked to, and passes everything
// else on. No operator, tensor or Python
// function is touched, so nothing that does not parse a device string can become slower.
#include "runtime/unified_name.h"

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace ditorch {
namespace {

constexpr const char* kConstructor =
    "_ZN3c106DeviceC1ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
constexpr std::string_view kUnified = "device";
constexpr std::string_view kCuda = "cuda";

using Constructor = void (*)(c10::Device*, const std::string&);
Constructor original = nullptr;
const std::string* honest_type = nullptr;  // never destroyed: torch may parse names to the end
std::atomic<bool> cuda_too{false};

bool names(const std::string& text, std::string_view name) {
  return text.compare(0, name.size(), name) == 0 &&
         (text.size() == name.size() || text[name.size()] == ':');
}

void make_device(c10::Device* self, const std::string& text) {
  for (auto name : {kUnified, kCuda}) {
    if (!names(text, name) || (name == kCuda && !cuda_too)) continue;
    return original(self, *honest_type + text.substr(name.size()));
  }
  original(self, text);
}

// The dynamic section's tables of one loaded library.
struct DynamicTables {
  const char* strings = nullptr;
  const ElfW(Sym) * symbols = nullptr;
  const ElfW(Rela) * lazy = nullptr;
  size_t lazy_bytes = 0;
  const ElfW(Rela) * eager = nullptr;
  size_t eager_bytes = 0;
};

DynamicTables tables_of(const dl_phdr_info& library) {
  DynamicTables tables;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    if (library.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    auto* entry =
        reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      auto* address = reinterpret_cast<const void*>(entry->d_un.d_ptr);
      switch (entry->d_tag) {
        case DT_STRTAB:
          tables.strings = static_cast<const char*>(address);
          break;
        case DT_SYMTAB:
          tables.symbols = static_cast<const ElfW(Sym)*>(address);
          break;
        case DT_JMPREL:
          tables.lazy = static_cast<const ElfW(Rela)*>(address);
          break;
        case DT_PLTRELSZ:
          tables.lazy_bytes = entry->d_un.d_val;
          break;
        case DT_RELA:
          tables.eager = static_cast<const ElfW(Rela)*>(address);
          break;
        case DT_RELASZ:
          tables.eager_bytes = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
  }
  return tables;
}

// The slot may lie in pages the loader has made read-only (RELRO); they stay writable after.
bool redirect(void** slot) {
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto start = reinterpret_cast<uintptr_t>(slot) & ~(page - 1);
  if (mprotect(reinterpret_cast<void*>(start), page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, reinterpret_cast<void*>(&make_device), __ATOMIC_RELEASE);
  return true;
}

int redirect_slots(const dl_phdr_info& library, const DynamicTables& tables,
                   const ElfW(Rela) * relocations, size_t bytes) {
  int redirected = 0;
  for (size_t i = 0; relocations && i < bytes / sizeof(ElfW(Rela)); ++i) {
    auto symbol = ELF64_R_SYM(relocations[i].r_info);
    if (symbol == 0 || std::strcmp(tables.strings + tables.symbols[symbol].st_name, kConstructor))
      continue;
    auto** slot = reinterpret_cast<void**>(library.dlpi_addr + relocations[i].r_offset);
    redirected += redirect(slot);
  }
  return redirected;
}

// Only torch's own libraries: this one must keep reaching the original constructor.
int redirect_library(dl_phdr_info* library, size_t, void* count) {
  std::string_view path = library->dlpi_name;
  auto file = path.substr(path.rfind('/') + 1);
  if (file.substr(0, 8) != "libtorch") return 0;
  auto tables = tables_of(*library);
  if (!tables.strings || !tables.symbols) return 0;
  *static_cast<int*>(count) += redirect_slots(*library, tables, tables.lazy, tables.lazy_bytes) +
                               redirect_slots(*library, tables, tables.eager, tables.eager_bytes);
  return 0;
}

}  // namespace

void unify_device_name(const std::string& device_type) {
  honest_type = new std::string(device_type);
  original = reinterpret_cast<Constructor>(dlsym(RTLD_DEFAULT, kConstructor));
  if (!original) {  // libc10 was loaded privately: ask it by name
    if (void* c10 = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD)) {
      original = reinterpret_cast<Constructor>(dlsym(c10, kConstructor));
    }
  }
  int redirected = 0;
  if (original) dl_iterate_phdr(redirect_library, &redirected);
  TORCH_CHECK(redirected > 0,
              "this build of torch cannot be taught the device name \"device\": it does not reach "
              "c10::Device's constructor through a global offset table; use \"",
              device_type, "\" as the device");
}

void unify_cuda_name() { cuda_too = true; }

}  // namespace ditorch
