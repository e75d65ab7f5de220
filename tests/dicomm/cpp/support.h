// What the C++ tests of libdicomm share: a store, payloads that can be recognised, ranks as
// threads.
#pragma once

#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../memory_store.h"
#include "core/communicator.h"

namespace dicomm::testing {

inline std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <class... Parts>
std::uint64_t mix(std::uint64_t first, std::uint64_t second, Parts... rest) {
  return mix(mix(first) ^ second, static_cast<std::uint64_t>(rest)...);
}

// A payload in which every word depends on the key and on where it stands.
inline std::uint64_t pattern_word(std::uint64_t key, std::size_t index) {
  return key + index * 0x9e3779b97f4a7c15;
}

inline void fill(std::byte* data, std::size_t bytes, std::uint64_t key) {
  const std::size_t words = bytes / 8;
  for (std::size_t i = 0; i < words; ++i) {
    const std::uint64_t word = pattern_word(key, i);
    std::memcpy(data + 8 * i, &word, 8);
  }
  const std::uint64_t last = pattern_word(key, words);
  if (bytes % 8 > 0) std::memcpy(data + 8 * words, &last, bytes % 8);  // data may be null
}

// Where the payload is not the pattern; nothing where it is.
inline std::optional<std::size_t> difference(const std::byte* data, std::size_t bytes,
                                             std::uint64_t key) {
  const std::size_t words = bytes / 8;
  std::uint64_t differences = 0;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    differences |= word ^ pattern_word(key, i);
  }
  const std::uint64_t last = pattern_word(key, words);
  const bool same_end = bytes % 8 == 0 || std::memcmp(data + 8 * words, &last, bytes % 8) == 0;
  if (differences == 0 && same_end) return std::nullopt;
  for (std::size_t i = 0; i < bytes; ++i) {
    const std::uint64_t word = pattern_word(key, i / 8);
    if (std::memcmp(data + i, reinterpret_cast<const std::byte*>(&word) + i % 8, 1) != 0) return i;
  }
  return bytes;
}

using Bytes = std::vector<std::byte>;

inline Bytes payload(std::size_t bytes, std::uint64_t key) {
  Bytes data(bytes);
  fill(data.data(), bytes, key);
  return data;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline Options options(int rank, int world_size, const std::string& transport) {
  Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.secret = "of the tests";
  options.transport = transport;
  options.listen_address = "127.0.0.1";
  options.timeout = std::chrono::seconds(60);
  return options;
}

// body(rank) on one thread a rank; rethrows what the first of them threw.
inline void run_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures(count);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < count; ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (...) {
          failures[rank] = std::current_exception();
        }
      });
  }
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

using RankBody = std::function<void(std::shared_ptr<Communicator>)>;

// One communicator a rank, each on a thread of its own; closed when all bodies are through.
inline void run_ranks(int world_size, const std::string& transport, const RankBody& body) {
  const auto store = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<Communicator>> communicators(world_size);
  run_threads(world_size, [&](int rank) {
    communicators[rank] = Communicator::create(store, options(rank, world_size, transport));
    body(communicators[rank]);
  });
  run_threads(world_size, [&](int rank) { communicators[rank]->close(); });
}

inline int count(const std::string& text, const std::string& words) {
  int found = 0;
  for (auto at = text.find(words); at != text.npos; at = text.find(words, at + 1)) ++found;
  return found;
}

// What an action says there.
inline std::string words_on_stderr(const std::function<void()>& action) {
  std::FILE* file = std::tmpfile();
  if (!file) throw Error("no temporary file");
  const int before = ::dup(STDERR_FILENO);
  ::dup2(::fileno(file), STDERR_FILENO);
  action();
  ::dup2(before, STDERR_FILENO);
  ::close(before);
  std::string words(10'000, ' ');
  std::rewind(file);
  words.resize(std::fread(words.data(), 1, words.size(), file));
  std::fclose(file);
  return words;
}

}  // namespace dicomm::testing
