// A chip for tests that is as asynchronous, and its memory as far from the host, as the runtime ABI
// allows: what forgets to wait reads or overwrites the wrong bytes, and a host that follows a
// device pointer dies of SIGSEGV.
//
// Every stream has a thread that does its work in order, each piece after a random delay.
// Environment: ASYNC_CHIP_SEED (1); ASYNC_CHIP_DELAY_US (300), the longest of these delays;
// ASYNC_CHIP_KERNELS (1), 0 to leave every operator to the host, whose bits are the CPU's;
// ASYNC_CHIP_IMPORTS (1), 0 to refuse other processes' memory.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "operators.h"

namespace async_chip {

constexpr std::size_t kMemoryBytes = std::size_t{64} << 20;

// A number of the environment.
unsigned setting(const char* name, unsigned otherwise);

// Keeps a sentence for last_error and hands `status` back.
ditorch_status fail(ditorch_status status, const std::string& sentence);
const char* last_error();

// A moment of a stream that others may wait for.
class Mark {
 public:
  void happen();
  bool has_happened();
  void wait();
  void wait_for(std::chrono::milliseconds most);
  std::int64_t happened_at_ns();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
  std::int64_t happened_at_ns_ = 0;
};

// A thread that runs pieces of work one after the other. It lives as long as the process.
class Queue {
 public:
  using Work = std::function<void()>;

  // Gives every stream, by its number, delays of its own.
  explicit Queue(unsigned number);
  void submit(Work work);
  // Work that is not delayed, as it takes no time on a chip either.
  std::shared_ptr<Mark> mark();
  bool is_idle();
  void synchronize() { mark()->wait(); }

 private:
  struct Entry {
    Work work;
    bool is_delayed;
  };

  void put(Entry entry);
  void run();
  std::chrono::microseconds delay();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool busy_ = false;
  bool started_ = false;
  std::mt19937 random_;
};

// The queue of a stream, NULL being the default one; and all queues there are.
Queue& queue_of(ditorch_stream* stream);
void synchronize_all();

// Where the work of streams finds the bytes behind a device pointer.
void* bytes_behind(const void* device_pointer);

ditorch_status memory_allocate(std::int32_t device, std::size_t bytes, void** pointer);
ditorch_status memory_free(std::int32_t device, void* pointer);
ditorch_status memory_info(std::int32_t device, std::size_t* free_bytes, std::size_t* total_bytes);
ditorch_status memory_copy(std::int32_t device, ditorch_stream* stream, void* destination,
                           const void* source, std::size_t bytes, ditorch_copy_kind kind);

// Makes a range of addresses of the chip's size, of a file's bytes or, without one, of none.
char* map_memory(int protection, int file = -1);
// Memory that is another process's: where the work of streams finds the bytes; null if it is not.
const void* imported_bytes(const void* device_pointer);
void describe_memory(ditorch_memory_handle* handle, int file, std::size_t offset,
                     std::size_t number);
ditorch_status memory_peer_handle(std::int32_t device, void* pointer, std::size_t bytes,
                                  ditorch_peer_handle* handle);
ditorch_status memory_export(std::int32_t device, const void* pointer,
                             ditorch_memory_handle* handle);
ditorch_status memory_import(std::int32_t device, const ditorch_memory_handle* handle,
                             void** pointer);
ditorch_status memory_import_release(std::int32_t device, void* pointer);

}  // namespace async_chip
