#include "transport/verbs/memory.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

std::uint64_t page_bytes() {
  static const std::uint64_t bytes = ::sysconf(_SC_PAGESIZE);
  return bytes;
}

// Whole pages, within the region they are part of.
Region pages_around(const Region& region, std::uint64_t address, std::uint64_t bytes) {
  const std::uint64_t page = page_bytes();
  const std::uint64_t first = std::max(region.address, address / page * page);
  const std::uint64_t last =
      std::min(region.address + region.bytes, (address + bytes + page - 1) / page * page);
  Region pages = region;
  pages.address = first;
  pages.bytes = last - first;
  return pages;
}

}  // namespace

std::shared_ptr<Registration> Registration::make(const Region& region,
                                                 const std::vector<Registrar*>& devices) {
  std::shared_ptr<Registration> registration(new Registration(region, devices));
  bool any = false;
  for (Registrar* device : devices) {
    registration->registered_.push_back(device->enter(region));
    any |= registration->registered_.back().has_value();
  }
  return any ? registration : nullptr;
}

Registration::~Registration() {
  for (std::size_t i = 0; i < registered_.size(); ++i)
    if (registered_[i]) devices_[i]->leave(registered_[i]->handle);
}

bool Registration::keep_reachable(const Region& region, const Probe& probe) {
  bool any = false;
  for (std::size_t i = 0; i < registered_.size(); ++i) {
    if (!registered_[i]) continue;
    if (probe(i, region, *registered_[i])) {
      any = true;
      continue;
    }
    devices_[i]->leave(registered_[i]->handle);
    registered_[i].reset();
  }
  return any;
}

void MemoryCache::declare(const Region& region) {
  if (region.bytes == 0 || region.address + region.bytes < region.address)
    throw Error(text("declare_memory: ", region.bytes, " bytes at ", region.address,
                     ": expected a stretch of memory"));
  const std::lock_guard held(mutex_);
  auto next = declared_.lower_bound(region.address);
  const bool overlaps_next = next != declared_.end() && next->first < region.address + region.bytes;
  const bool overlaps_previous =
      next != declared_.begin() &&
      std::prev(next)->first + std::prev(next)->second.bytes > region.address;
  if (overlaps_next || overlaps_previous)
    throw Error("declare_memory: part of it is declared already; forget_memory() comes first");
  declared_.emplace(region.address, region);
  if (!std::exchange(declared_before_, true)) registration_of(region.address, region.bytes);
}

void MemoryCache::forget(std::uint64_t address, std::uint64_t bytes) {
  const std::lock_guard held(mutex_);
  auto at = declared_.lower_bound(address);
  if (at != declared_.begin() && std::prev(at)->first + std::prev(at)->second.bytes > address) --at;
  while (at != declared_.end() && at->first < address + bytes) at = declared_.erase(at);
  std::erase_if(cached_, [&](const auto& entry) { return entry->overlaps(address, bytes); });
}

std::shared_ptr<Registration> MemoryCache::acquire(const void* data, std::uint64_t bytes) {
  const std::lock_guard held(mutex_);
  return registration_of(reinterpret_cast<std::uint64_t>(data), bytes);
}

std::shared_ptr<Registration> MemoryCache::registration_of(std::uint64_t address,
                                                           std::uint64_t bytes) {
  if (auto found = find(address, bytes)) return found;
  const Region* around = declared_around(address, bytes);
  if (!around) return Registration::make({address, bytes}, devices_);
  Region region = *around;
  auto registration = Registration::make(region, devices_);
  if (!registration) {  // it may be more than a device takes at once
    region = pages_around(*around, address, bytes);
    registration = Registration::make(region, devices_);
  }
  if (!registration) return nullptr;
  if (!registration->keep_reachable(region, probe_)) reaches_declared_ = false;
  keep(registration);
  return registration;
}

const Region* MemoryCache::declared_around(std::uint64_t address, std::uint64_t bytes) const {
  auto after = declared_.upper_bound(address);
  if (after == declared_.begin()) return nullptr;
  const Region& region = std::prev(after)->second;
  const std::uint64_t offset = address - region.address;
  return offset <= region.bytes && bytes <= region.bytes - offset ? &region : nullptr;
}

std::shared_ptr<Registration> MemoryCache::find(std::uint64_t address, std::uint64_t bytes) {
  const auto found = std::find_if(cached_.begin(), cached_.end(),
                                  [&](const auto& entry) { return entry->covers(address, bytes); });
  if (found == cached_.end()) return nullptr;
  cached_.splice(cached_.begin(), cached_, found);
  return cached_.front();
}

// Full: the one that is unused for longest goes.
void MemoryCache::keep(const std::shared_ptr<Registration>& registration) {
  if (cached_.size() >= kMaxEntries) {
    const auto unused = std::find_if(cached_.rbegin(), cached_.rend(),
                                     [](const auto& entry) { return entry.use_count() == 1; });
    if (unused == cached_.rend()) return;
    cached_.erase(std::next(unused).base());
  }
  cached_.push_front(registration);
}

}  // namespace dicomm::verbs
