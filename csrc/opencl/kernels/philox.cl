// Random numbers that any place of a sequence has by itself, as Philox4x32-10 gives them.
static inline float random_number(ulong key, long number) {
  uint4 words = (uint4)((uint)(number / 4), (uint)((number / 4) >> 32), 0, 0);
  uint first_key = (uint)key, second_key = (uint)(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint2 multipliers = (uint2)(0xD2511F53u, 0xCD9E8D57u);
    const uint2 high = mul_hi(multipliers, words.xz), low = multipliers * words.xz;
    words = (uint4)(high.y ^ words.y ^ first_key, low.y, high.x ^ words.w ^ second_key, low.x);
    first_key += 0x9E3779B9u;
    second_key += 0xBB67AE85u;
  }
  const uint word = number & 2 ? (number & 1 ? words.w : words.z) : (number & 1 ? words.y : words.x);
  return (word >> 8) * 0x1p-24f;
}
