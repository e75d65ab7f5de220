#include "device.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <string_view>

#include "memory.h"
#include "program.h"
#include "stream.h"

namespace opencl {
namespace {

template <class T>
T number(cl_device_id id, cl_device_info what) {
  T value{};
  clGetDeviceInfo(id, what, sizeof value, &value, nullptr);
  return value;
}

std::string text(cl_device_id id, cl_device_info what) {
  size_t bytes = 0;
  if (clGetDeviceInfo(id, what, 0, nullptr, &bytes) != CL_SUCCESS || bytes == 0) return "unknown";
  std::string value(bytes, '\0');
  clGetDeviceInfo(id, what, bytes, value.data(), nullptr);
  value.resize(value.find('\0'));
  return value;
}

// What ditorch may use of the device's memory. A processor's is the machine's, of which drivers
// promise all; DITORCH_OPENCL_MEMORY_BYTES asks for less.
uint64_t memory_of(cl_device_id id) {
  const uint64_t whole = number<cl_ulong>(id, CL_DEVICE_GLOBAL_MEM_SIZE);
  const char* given = std::getenv("DITORCH_OPENCL_MEMORY_BYTES");
  if (!given || !*given) return whole;
  const std::string_view text = given;
  uint64_t wanted = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), wanted);
  if (error != std::errc() || end != text.end() || wanted == 0 || wanted > whole) {
    fail(DITORCH_INVALID, "DITORCH_OPENCL_MEMORY_BYTES is '" + std::string(text) +
                              "', expected bytes, at most the " + std::to_string(whole) +
                              " of the device");
  }
  return wanted;
}

std::vector<cl_device_id> every_device() {
  cl_uint count = 0;
  // An ICD loader without any driver answers with an error of an extension.
  if (clGetPlatformIDs(0, nullptr, &count) != CL_SUCCESS || count == 0) return {};
  std::vector<cl_platform_id> platforms(count);
  clGetPlatformIDs(count, platforms.data(), nullptr);
  std::vector<cl_device_id> found;
  for (cl_platform_id platform : platforms) {
    cl_uint here = 0;
    if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &here) != CL_SUCCESS) continue;
    const size_t before = found.size();
    found.resize(before + here);
    clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, here, found.data() + before, nullptr);
  }
  return found;
}

// Half a sentence that says why the device cannot be driven, or nothing.
std::string why_not(cl_device_id id) {
  if (!number<cl_bool>(id, CL_DEVICE_AVAILABLE)) return "is not available";
  if (!number<cl_bool>(id, CL_DEVICE_COMPILER_AVAILABLE)) return "has no compiler";
  if (!(number<cl_device_svm_capabilities>(id, CL_DEVICE_SVM_CAPABILITIES) &
        CL_DEVICE_SVM_COARSE_GRAIN_BUFFER)) {
    return "has no shared virtual memory (SVM), which ditorch needs";
  }
  return "";
}

std::vector<std::unique_ptr<Device>> find() {
  std::vector<cl_device_id> ids = every_device();
  std::stable_partition(ids.begin(), ids.end(), [](cl_device_id id) {
    return number<cl_device_type>(id, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_GPU;
  });
  std::vector<std::unique_ptr<Device>> found;
  std::string refused;
  for (cl_device_id id : ids) {
    const std::string name = text(id, CL_DEVICE_NAME), driver = text(id, CL_DRIVER_VERSION);
    const std::string reason = why_not(id);
    if (reason.empty()) {
      found.push_back(std::make_unique<Device>(id, name, driver));
    } else if (refused.empty()) {
      refused = "the OpenCL device " + name + " (driver " + driver + ") " + reason;
    }
  }
  if (found.empty() && !refused.empty()) fail(DITORCH_ERROR, refused);
  return found;
}

}  // namespace

Device::Device(cl_device_id id, std::string name, std::string driver)
    : id(id),
      name(std::move(name)),
      driver(std::move(driver)),
      maker(text(id, CL_DEVICE_VENDOR)),
      memory_bytes(memory_of(id)),
      largest_allocation_bytes(number<cl_ulong>(id, CL_DEVICE_MAX_MEM_ALLOC_SIZE)),
      largest_group_items(number<size_t>(id, CL_DEVICE_MAX_WORK_GROUP_SIZE)),
      is_cpu(number<cl_device_type>(id, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_CPU),
      has_double(number<cl_device_fp_config>(id, CL_DEVICE_DOUBLE_FP_CONFIG) != 0) {
  cl_int code;
  context = clCreateContext(nullptr, 1, &id, nullptr, nullptr, &code);
  check(code, "create a context");
  memory = std::make_unique<Memory>(*this);
  programs = std::make_unique<Programs>(*this);
  streams = std::make_unique<Streams>(*this);
}

Device::~Device() = default;

void Device::check(cl_int code, const char* action) const {
  if (code == CL_SUCCESS) return;
  fail(code == CL_MEM_OBJECT_ALLOCATION_FAILURE ? DITORCH_OUT_OF_MEMORY : DITORCH_ERROR,
       "the OpenCL device " + described() + " failed to " + action + ": " + name_of(code));
}

const std::vector<std::unique_ptr<Device>>& devices() {
  // Never destroyed: threads of the process may still use them while it exits.
  static const auto* found = new std::vector<std::unique_ptr<Device>>(find());
  return *found;
}

Device& device_at(int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= devices().size()) {
    fail(DITORCH_INVALID, "there is no OpenCL device " + std::to_string(index) +
                              ", expected 0 to " + std::to_string(devices().size() - 1));
  }
  return *devices()[static_cast<size_t>(index)];
}

std::string name_of(cl_int code) {
  static const std::map<cl_int, const char*> names = {
#define CODE(name) {name, #name}
      CODE(CL_DEVICE_NOT_FOUND),
      CODE(CL_DEVICE_NOT_AVAILABLE),
      CODE(CL_COMPILER_NOT_AVAILABLE),
      CODE(CL_MEM_OBJECT_ALLOCATION_FAILURE),
      CODE(CL_OUT_OF_RESOURCES),
      CODE(CL_OUT_OF_HOST_MEMORY),
      CODE(CL_PROFILING_INFO_NOT_AVAILABLE),
      CODE(CL_BUILD_PROGRAM_FAILURE),
      CODE(CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST),
      CODE(CL_INVALID_VALUE),
      CODE(CL_INVALID_CONTEXT),
      CODE(CL_INVALID_COMMAND_QUEUE),
      CODE(CL_INVALID_MEM_OBJECT),
      CODE(CL_INVALID_BINARY),
      CODE(CL_INVALID_BUILD_OPTIONS),
      CODE(CL_INVALID_PROGRAM_EXECUTABLE),
      CODE(CL_INVALID_KERNEL_NAME),
      CODE(CL_INVALID_ARG_INDEX),
      CODE(CL_INVALID_ARG_VALUE),
      CODE(CL_INVALID_ARG_SIZE),
      CODE(CL_INVALID_KERNEL_ARGS),
      CODE(CL_INVALID_WORK_GROUP_SIZE),
      CODE(CL_INVALID_WORK_ITEM_SIZE),
      CODE(CL_INVALID_EVENT),
      CODE(CL_INVALID_OPERATION),
#undef CODE
  };
  const auto found = names.find(code);
  return (found == names.end() ? "OpenCL's error" : found->second) + (" (" + std::to_string(code)) +
         ")";
}

}  // namespace opencl
