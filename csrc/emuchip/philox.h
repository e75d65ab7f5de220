// Random numbers that any place of a sequence has by itself, as Philox4x32-10 gives them.
#pragma once

#include <cstdint>

namespace emuchip {

// The numbers [first, first + count) under `key`, each from 0 to below 1.
void random_numbers(uint64_t key, int64_t first, float* values, int64_t count);
void random_numbers(uint64_t key, int64_t first, double* values, int64_t count);

}  // namespace emuchip
