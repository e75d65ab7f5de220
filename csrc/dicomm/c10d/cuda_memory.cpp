#include "cuda_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>

namespace dicomm {

namespace {

// What is used of the driver's interface (cuda.h). It is found when it is needed: nothing is built
// against CUDA, and one build runs with and without a GPU.
struct Driver {
  using Status = int;  // CUresult; 0: success
  using Context = void*;
  using Address = unsigned long long;
  struct IpcHandle {
    unsigned char words[64];
  };
  static constexpr int kDmabufDescriptor = 1;     // a type of handle
  static constexpr unsigned kLazyPeerAccess = 1;  // reaches another GPU's memory, where it can

  Status (*cuDeviceGet)(int* device, int ordinal);
  Status (*cuDevicePrimaryCtxRetain)(Context* context, int device);
  Status (*cuDevicePrimaryCtxRelease_v2)(int device);
  Status (*cuCtxPushCurrent_v2)(Context context);
  Status (*cuCtxPopCurrent_v2)(Context* context);
  Status (*cuMemGetAddressRange_v2)(Address* base, std::size_t* bytes, Address address);
  Status (*cuIpcGetMemHandle)(IpcHandle* handle, Address address);
  Status (*cuIpcOpenMemHandle_v2)(Address* address, IpcHandle handle, unsigned flags);
  Status (*cuIpcCloseMemHandle)(Address address);
  Status (*cuGetErrorString)(Status status, const char** text);
  // Null with drivers before CUDA 11.7.
  Status (*cuMemGetHandleForAddressRange)(void* handle, Address address, std::size_t bytes,
                                          int type, unsigned long long flags);

  void check(Status status, const char* action) const {
    const char* text = nullptr;
    if (status != 0) cuGetErrorString(status, &text);
    TORCH_CHECK(status == 0, "dicomm: the GPU's driver failed to ", action, ": ",
                text ? text : "unknown error");
  }
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Null: it is not installed, or lacks a function.
const Driver* driver() {
  static const Driver* const found = []() -> const Driver* {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
    static Driver driver;
#define DICOMM_FIND(name) find(library, #name, driver.name)
    const bool has_all = DICOMM_FIND(cuDeviceGet) && DICOMM_FIND(cuDevicePrimaryCtxRetain) &&
                         DICOMM_FIND(cuDevicePrimaryCtxRelease_v2) &&
                         DICOMM_FIND(cuCtxPushCurrent_v2) && DICOMM_FIND(cuCtxPopCurrent_v2) &&
                         DICOMM_FIND(cuMemGetAddressRange_v2) && DICOMM_FIND(cuIpcGetMemHandle) &&
                         DICOMM_FIND(cuIpcOpenMemHandle_v2) && DICOMM_FIND(cuIpcCloseMemHandle) &&
                         DICOMM_FIND(cuGetErrorString);
    DICOMM_FIND(cuMemGetHandleForAddressRange);
#undef DICOMM_FIND
    return has_all ? &driver : nullptr;
  }();
  return found;
}

// Makes the context that torch uses current: the transport's own threads have none.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, c10::DeviceIndex index) : driver_(driver) {
    driver_.check(driver_.cuDeviceGet(&device_, index), "find the GPU");
    Driver::Context context = nullptr;
    driver_.check(driver_.cuDevicePrimaryCtxRetain(&context, device_), "start on the GPU");
    const auto pushed = driver_.cuCtxPushCurrent_v2(context);
    if (pushed != 0) driver_.cuDevicePrimaryCtxRelease_v2(device_);
    driver_.check(pushed, "make its context current");
  }
  ~CurrentContext() {
    Driver::Context popped = nullptr;
    driver_.cuCtxPopCurrent_v2(&popped);
    driver_.cuDevicePrimaryCtxRelease_v2(device_);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  int device_ = 0;
};

class CudaMemory final : public ChipMemory {
 public:
  explicit CudaMemory(const Driver& driver) : driver_(driver) {}

  MemoryHandle export_from(c10::DeviceIndex device, const void* address) const override {
    const CurrentContext current(driver_, device);
    const auto here = reinterpret_cast<Driver::Address>(address);
    Driver::Address base = 0;
    std::size_t bytes = 0;
    driver_.check(driver_.cuMemGetAddressRange_v2(&base, &bytes, here), "find an allocation");
    Driver::IpcHandle words{};
    driver_.check(driver_.cuIpcGetMemHandle(&words, base), "export memory");
    MemoryHandle handle;
    static_assert(sizeof words.words == sizeof handle.allocation);
    std::copy(std::begin(words.words), std::end(words.words), handle.allocation.begin());
    handle.offset_bytes = here - base;
    handle.process = ::getpid();
    return handle;
  }

  void* import(c10::DeviceIndex device, const MemoryHandle& handle) const override {
    const CurrentContext current(driver_, device);
    Driver::IpcHandle words{};
    std::copy(handle.allocation.begin(), handle.allocation.end(), words.words);
    Driver::Address imported = 0;
    driver_.check(driver_.cuIpcOpenMemHandle_v2(&imported, words, Driver::kLazyPeerAccess),
                  "import memory");
    return reinterpret_cast<void*>(imported);
  }

  void release(c10::DeviceIndex device, void* imported) const override {
    const CurrentContext current(driver_, device);
    driver_.check(driver_.cuIpcCloseMemHandle(reinterpret_cast<Driver::Address>(imported)),
                  "release imported memory");
  }

  // Torch's own copy, which is in the current stream's order.
  void copy(c10::DeviceIndex device, void* to, const void* from, std::size_t bytes) const override {
    const at::NoGradGuard no_grad;
    const c10::Device gpu(c10::kCUDA, device);
    const auto tensor = [&](void* data) {
      return at::for_blob(data, {static_cast<std::int64_t>(bytes)})
          .target_device(gpu)  // torch need not ask the driver whose the memory is
          .options(at::TensorOptions().dtype(at::kByte).device(gpu))
          .make_tensor();
    };
    tensor(to).copy_(tensor(const_cast<void*>(from)), /*non_blocking=*/true);
  }

  // Whole pages of the host, as the driver wants them.
  std::optional<Dmabuf> export_dmabuf(c10::DeviceIndex device, const void* address,
                                      std::size_t bytes) const override {
    if (!driver_.cuMemGetHandleForAddressRange) return std::nullopt;
    const CurrentContext current(driver_, device);
    const auto page = static_cast<Driver::Address>(::sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<Driver::Address>(address);
    const auto begin = first / page * page;
    const auto end = (first + bytes + page - 1) / page * page;
    int fd = -1;
    const auto status = driver_.cuMemGetHandleForAddressRange(&fd, begin, end - begin,
                                                              Driver::kDmabufDescriptor, 0);
    if (status != 0 || fd < 0) return std::nullopt;
    return Dmabuf{Fd(fd), first - begin};
  }

 private:
  const Driver& driver_;
};

}  // namespace

std::unique_ptr<ChipMemory> cuda_memory(c10::DeviceType type) {
  if (type != c10::kCUDA || !driver()) return nullptr;
  return std::make_unique<CudaMemory>(*driver());
}

}  // namespace dicomm
