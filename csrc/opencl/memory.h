// The memory of a device: coarse-grained shared virtual memory.
//
// The host may follow such a pointer only between a map and an unmap, so that to ditorch the memory
// is the device's alone, and copies are commands of a queue.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "device.h"

namespace opencl {

class Memory {
 public:
  explicit Memory(Device& device) : device_(device) {}

  // Throws DITORCH_OUT_OF_MEMORY if the device has no such piece.
  void* allocate(size_t bytes);
  // Waits for the work that may use it.
  void free(void* pointer);
  size_t free_bytes();

  struct Piece {
    char* begin;
    size_t bytes;
  };
  // The allocation that the pointer points into.
  Piece around(const void* pointer);

 private:
  Device& device_;
  std::mutex mutex_;
  std::map<char*, size_t> held_;
  size_t used_bytes_ = 0;
};

}  // namespace opencl
