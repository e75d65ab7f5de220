// Which memory the NICs may touch, and the cache of those registrations.
//
// Registering costs tens of microseconds and more, so memory that keeps its pages until it is
// forgotten (declared: a chip's allocator segment, our own buffers) is registered once, whole.
// Other memory may change its pages at any time behind our back; it is registered for one
// transfer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/communicator.h"

namespace dicomm::verbs {

using Region = MemoryRegion;

struct Registered {
  void* handle = nullptr;
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
  bool is_chips = false;  // what a device writes there is to be flushed: see Rails::flush()
};

// What a device does.
class Registrar {
 public:
  virtual ~Registrar() = default;
  virtual std::optional<Registered> enter(const Region& region) = 0;  // nothing: it cannot
  virtual void leave(void* handle) = 0;
};

// Whether a device really reaches memory that it registered: of a chip's it may not.
using Probe = std::function<bool(std::size_t device, const Region&, const Registered&)>;

// A stretch of memory registered with every device; not for longer than it lives.
class Registration {
 public:
  // Null where not one device can.
  static std::shared_ptr<Registration> make(const Region& region,
                                            const std::vector<Registrar*>& devices);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // By device; nothing where that one cannot reach the memory.
  const std::optional<Registered>& on(std::size_t device) const { return registered_[device]; }
  bool covers(std::uint64_t address, std::uint64_t bytes) const {
    return address >= address_ && bytes <= bytes_ && address - address_ <= bytes_ - bytes;
  }
  bool overlaps(std::uint64_t address, std::uint64_t bytes) const {
    return address < address_ + bytes_ && address_ < address + bytes;
  }
  std::uint64_t bytes() const { return bytes_; }
  // Ends the registration with devices that do not reach it. False: none does.
  bool keep_reachable(const Region& region, const Probe& probe);

 private:
  Registration(const Region& region, const std::vector<Registrar*>& devices)
      : address_(region.address), bytes_(region.bytes), devices_(devices) {}

  std::uint64_t address_, bytes_;
  std::vector<Registrar*> devices_;
  std::vector<std::optional<Registered>> registered_;
};

// From any thread. Its mutex is its own and not the communicator's: a chip's allocator declares and
// forgets memory while it holds its own mutex, which a thread with the communicator's may wait for.
class MemoryCache {
 public:
  // The probe is asked about declared memory.
  MemoryCache(std::vector<Registrar*> devices, Probe probe)
      : devices_(std::move(devices)), probe_(std::move(probe)) {}

  // A region must not overlap another; throws Error. The first is registered and probed at once,
  // so that reaches_declared() tells early.
  void declare(const Region& region);
  // What is declared inside is no longer, and its registrations end with the transfers that use
  // them.
  void forget(std::uint64_t address, std::uint64_t bytes);
  // Null where the memory cannot be registered. On no device where none reaches it.
  std::shared_ptr<Registration> acquire(const void* data, std::uint64_t bytes);
  // Whether some device reached all declared memory so far.
  bool reaches_declared() const { return reaches_declared_; }

 private:
  // Under the mutex.
  std::shared_ptr<Registration> registration_of(std::uint64_t address, std::uint64_t bytes);
  const Region* declared_around(std::uint64_t address, std::uint64_t bytes) const;
  std::shared_ptr<Registration> find(std::uint64_t address, std::uint64_t bytes);
  void keep(const std::shared_ptr<Registration>& registration);

  static constexpr std::size_t kMaxEntries = 1024;

  std::vector<Registrar*> devices_;
  Probe probe_;
  std::mutex mutex_;
  bool declared_before_ = false;
  std::atomic<bool> reaches_declared_{true};
  std::map<std::uint64_t, Region> declared_;         // by address
  std::list<std::shared_ptr<Registration>> cached_;  // the last used first
};

}  // namespace dicomm::verbs
