// Sums in the chip's order and precision: where two vendors' last bits come from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "chip_file.h"
#include "elements.h"

namespace emuchip {

// `width` sums side by side, each of `terms` terms. The terms are split into split_k ranges, a
// range into blocks; a block is summed term by term, blocks are summed in the chip's order, and
// ranges one after the other.
template <class T>
class Accumulator {
 public:
  Accumulator(const Numerics& numerics, int64_t terms, int64_t width)
      : pairwise_(numerics.order == Order::kPairwise),
        round_(numerics.accumulate == Accumulate::kBfloat16 && sizeof(T) == sizeof(float)),
        terms_(terms),
        width_(width),
        split_terms_((terms + numerics.split_k - 1) / numerics.split_k),
        block_terms_(numerics.order == Order::kSequential && !round_ ? split_terms_ : 32),
        block_(width),
        pending_(width * (pairwise_ ? 2 + std::bit_width(blocks_in_a_split()) : 2)),
        total_(width) {
    reset();
  }

  void reset() {
    done_ = 0;
    std::fill(block_.begin(), block_.end(), T(0));
    std::fill(total_.begin(), total_.end(), T(0));
    begin_split();
  }

  // Adds the next term of each sum.
  void add(const T* term) {
    for (int64_t i = 0; i < width_; ++i) block_[i] += term[i];
    if (++added_ < block_end_) return;
    add_block(block_.data());
    std::fill(block_.begin(), block_.end(), T(0));
  }

  // The first term that the current block does not hold.
  int64_t block_end() const { return block_end_; }

  // Adds all terms up to block_end(), which the caller has summed one by one.
  void add_block(const T* block) {
    std::copy(block, block + width_, pending(levels_++));
    ++blocks_;
    // Pairwise, as a binary counter carries; else every block goes to the one running sum.
    for (int64_t carry = blocks_; levels_ > 1 && (!pairwise_ || carry % 2 == 0); carry /= 2) {
      merge_last_two();
    }
    done_ = added_ = block_end_;
    if (done_ == split_end_) end_split();
    block_end_ = std::min(done_ + block_terms_, split_end_);
  }

  // The sums, once every term has been added.
  const T* total() const { return total_.data(); }

 private:
  uint64_t blocks_in_a_split() const {
    return static_cast<uint64_t>(split_terms_ / std::max<int64_t>(1, block_terms_));
  }

  void begin_split() {
    levels_ = 0;
    blocks_ = 0;
    added_ = done_;
    split_end_ = std::min(done_ + split_terms_, terms_);
    block_end_ = std::min(done_ + block_terms_, split_end_);
  }

  void end_split() {
    while (levels_ > 1) merge_last_two();
    add_to(total_.data(), pending(0));
    begin_split();
  }

  void merge_last_two() {
    --levels_;
    add_to(pending(levels_ - 1), pending(levels_));
  }

  T* pending(int64_t level) { return pending_.data() + level * width_; }

  void add_to(T* __restrict sums, const T* __restrict more) {
    for (int64_t i = 0; i < width_; ++i) sums[i] += more[i];
    if (!round_) return;
    for (int64_t i = 0; i < width_; ++i) sums[i] = from_storage<T>(to_storage<Bfloat16>(sums[i]));
  }

  const bool pairwise_;
  const bool round_;  // to bfloat16 whenever a block has been added
  const int64_t terms_;
  const int64_t width_;
  const int64_t split_terms_;
  const int64_t block_terms_;
  int64_t done_ = 0;   // terms in finished blocks
  int64_t added_ = 0;  // the same and those in block_
  int64_t blocks_ = 0;
  int64_t split_end_ = 0;
  int64_t block_end_ = 0;
  std::vector<T> block_;
  int64_t levels_ = 0;
  std::vector<T> pending_;  // the sums of `levels_` runs of blocks, not yet added to each other
  std::vector<T> total_;
};

}  // namespace emuchip
