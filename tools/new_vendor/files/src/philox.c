/* Random numbers that any place of a sequence has by itself, as Philox4x32-10 gives them. They are
 * the same on every chip: a kernel of your own must give these, too. */
#include "kernels.h"

double random_number(uint64_t key, int64_t number) {
  const uint64_t counter = (uint64_t)number / 4;
  uint32_t words[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
  uint32_t keys[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = (uint64_t)0xD2511F53u * words[0];
    const uint64_t second = (uint64_t)0xCD9E8D57u * words[2];
    words[0] = (uint32_t)(second >> 32) ^ words[1] ^ keys[0];
    words[1] = (uint32_t)second;
    words[2] = (uint32_t)(first >> 32) ^ words[3] ^ keys[1];
    words[3] = (uint32_t)first;
    keys[0] += 0x9E3779B9u;
    keys[1] += 0xBB67AE85u;
  }
  return (words[number % 4] >> 8) * 0x1p-24;
}
