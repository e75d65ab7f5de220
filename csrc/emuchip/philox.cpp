#include "philox.h"

#include <array>

namespace emuchip {
namespace {

constexpr int kRounds = 10;
constexpr int64_t kWords = 4;
constexpr uint32_t kMultipliers[] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kKeySteps[] = {0x9E3779B9u, 0xBB67AE85u};

uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }
uint32_t high(uint64_t value) { return static_cast<uint32_t>(value >> 32); }

std::array<uint32_t, kWords> philox(uint64_t key, uint64_t counter) {
  std::array<uint32_t, kWords> words{low(counter), high(counter), 0, 0};
  uint32_t keys[] = {low(key), high(key)};
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t first = uint64_t{kMultipliers[0]} * words[0];
    const uint64_t second = uint64_t{kMultipliers[1]} * words[2];
    words = {high(second) ^ words[1] ^ keys[0], low(second), high(first) ^ words[3] ^ keys[1],
             low(first)};
    for (int half = 0; half < 2; ++half) keys[half] += kKeySteps[half];
  }
  return words;
}

template <class T>
void fill(uint64_t key, int64_t first, T* values, int64_t count) {
  constexpr T kStep = T(1) / (1 << 24);
  std::array<uint32_t, kWords> words{};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = first + i, word = number % kWords;
    if (i == 0 || word == 0) words = philox(key, static_cast<uint64_t>(number / kWords));
    values[i] = static_cast<T>(words[word] >> 8) * kStep;
  }
}

}  // namespace

void random_numbers(uint64_t key, int64_t first, float* values, int64_t count) {
  fill(key, first, values, count);
}

void random_numbers(uint64_t key, int64_t first, double* values, int64_t count) {
  fill(key, first, values, count);
}

}  // namespace emuchip
