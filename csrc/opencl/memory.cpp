#include "memory.h"

#include <iterator>

#include "stream.h"

namespace opencl {

void* Memory::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  std::lock_guard lock(mutex_);
  // A driver may promise more than the device has, so that the count is kept here.
  if (bytes > device_.memory_bytes - used_bytes_ || bytes > device_.largest_allocation_bytes) {
    fail(DITORCH_OUT_OF_MEMORY,
         "the OpenCL device " + device_.described() +
             " is out of memory: " + std::to_string(bytes) + " bytes were asked for, " +
             std::to_string(device_.memory_bytes - used_bytes_) + " of " +
             std::to_string(device_.memory_bytes) + " are free, and one piece has at most " +
             std::to_string(device_.largest_allocation_bytes));
  }
  auto* pointer = static_cast<char*>(clSVMAlloc(device_.context, CL_MEM_READ_WRITE, bytes, 0));
  if (!pointer) {
    fail(DITORCH_OUT_OF_MEMORY, "the OpenCL device " + device_.described() + " has no piece of " +
                                    std::to_string(bytes) + " bytes");
  }
  held_[pointer] = bytes;
  used_bytes_ += bytes;
  return pointer;
}

void Memory::free(void* pointer) {
  if (!pointer) return;
  device_.streams->synchronize_all();
  std::lock_guard lock(mutex_);
  const auto found = held_.find(static_cast<char*>(pointer));
  if (found == held_.end()) {
    fail(DITORCH_INVALID, "memory_free was given a pointer that memory_allocate did not give");
  }
  clSVMFree(device_.context, pointer);
  used_bytes_ -= found->second;
  held_.erase(found);
}

size_t Memory::free_bytes() {
  std::lock_guard lock(mutex_);
  return device_.memory_bytes - used_bytes_;
}

Memory::Piece Memory::around(const void* pointer) {
  std::lock_guard lock(mutex_);
  auto* wanted = static_cast<char*>(const_cast<void*>(pointer));
  auto after = held_.upper_bound(wanted);
  if (after == held_.begin()) fail(DITORCH_INVALID, "a pointer that memory_allocate did not give");
  const auto [begin, bytes] = *std::prev(after);
  return {begin, bytes};
}

}  // namespace opencl
