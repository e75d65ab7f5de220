// The OpenCL devices of this machine that ditorch can drive.
#pragma once

#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"

namespace opencl {

class Memory;
class Programs;
class Streams;

struct Device {
  Device(cl_device_id id, std::string name, std::string driver);
  ~Device();

  // Throws what an OpenCL function answered, unless it is CL_SUCCESS; `action` is what failed, for
  // example "copy".
  void check(cl_int code, const char* action) const;
  std::string described() const { return name + " (driver " + driver + ")"; }

  cl_device_id id;
  std::string name, driver, maker;
  uint64_t memory_bytes;  // what ditorch may use of it
  size_t largest_allocation_bytes, largest_group_items;
  bool is_cpu, has_double;
  cl_context context = nullptr;

  // Held while work is submitted: the arguments of a cl_kernel belong to nobody in particular, and
  // the kernels of one operator share their stream's scratch memory.
  std::mutex submitting;
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Programs> programs;
  std::unique_ptr<Streams> streams;
};

// All of them, GPUs first. Throws if a machine has OpenCL devices but none of them can be driven.
const std::vector<std::unique_ptr<Device>>& devices();

Device& device_at(int32_t index);

// The name of an error code, for example "CL_OUT_OF_RESOURCES (-5)".
std::string name_of(cl_int code);

}  // namespace opencl
