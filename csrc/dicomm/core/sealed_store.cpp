#include "core/sealed_store.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/sha256.h"
#include "core/text.h"

namespace dicomm {

namespace {

constexpr std::chrono::seconds kTrue{10};  // for the rank to overwrite what somebody else wrote
constexpr std::chrono::milliseconds kLook{20};

}  // namespace

SealedStore::SealedStore(std::shared_ptr<Store> store, std::string secret)
    : store_(std::move(store)), secret_(std::move(secret)) {}

void SealedStore::set(const std::string& key, const std::string& value) {
  store_->set(key, value + seal(key, value));
}

std::string SealedStore::get(const std::string& key, std::chrono::milliseconds timeout) {
  const Time deadline = deadline_after(timeout);
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    const std::string found = store_->get(key, std::max(left, std::chrono::milliseconds(0)));
    const std::string value = found.substr(0, found.rfind(' '));
    const std::string expected = value + seal(key, value);
    if (equal(sha256(found), sha256(expected))) return value;
    const Time now = Clock::now();
    if (now > untrue_since(key) + kTrue)
      throw Error(text("nobody who knows this job's secret wrote '", key, "' to the store: the ",
                       "secrets differ, or a stranger wrote it"));
    if (now > deadline) throw Unsealed(text("nobody of this job wrote '", key, "'"));
    std::this_thread::sleep_for(kLook);
  }
}

// A space, then digits: what stands in front of them is read as before.
std::string SealedStore::seal(const std::string& key, const std::string& value) const {
  const Digest digest = hmac_sha256(secret_, text("store\n", key, '\n', value));
  std::string digits(2 * digest.size(), '0');
  for (std::size_t i = 0; i < digest.size(); ++i)
    std::snprintf(digits.data() + 2 * i, 3, "%02x", digest[i]);
  return ' ' + digits;
}

SealedStore::Time SealedStore::untrue_since(const std::string& key) {
  std::lock_guard lock(mutex_);
  const auto [entry, is_new] = untrue_.emplace(key, Clock::now());
  if (is_new)
    std::fprintf(stderr,
                 "dicomm: somebody without the job's secret wrote '%s' to the store, which is not "
                 "believed\n",
                 key.c_str());
  return entry->second;
}

}  // namespace dicomm
