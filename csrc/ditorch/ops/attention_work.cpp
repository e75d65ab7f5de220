// What attention in one piece computes: the pairs of a query and a key that it sees, and no others.
#include <algorithm>

#include "ops/attention.h"
#include "ops/attention_arguments.h"

namespace ditorch::attention {
namespace {

// Of how many keys up to its own the first `queries` are, summed: 1, 2, 3 and so on, to `keys`.
double pairs_up_to(int64_t queries, int64_t keys) {
  const auto rising = static_cast<double>(std::clamp<int64_t>(queries, 0, keys));
  const auto level = static_cast<double>(std::max<int64_t>(queries - keys, 0));
  return rising * (rising + 1) / 2 + level * static_cast<double>(keys);
}

struct Sequence {
  int64_t queries, keys;
  bool causal;
  int64_t window = 0;  // 0: none

  double pairs() const {
    if (!causal) return static_cast<double>(queries) * static_cast<double>(keys);
    const double unseen = window ? pairs_up_to(queries - window, keys) : 0;
    return pairs_up_to(queries, keys) - unseen;
  }
};

// Documents are of the longest one's length: where they end only the chip knows.
Sequence sequence_of_flash(c10::ArrayRef<c10::IValue> arguments, const FlashPlaces& at) {
  const auto& query = arguments[at.query].toTensor();
  const bool are_packed = query.dim() == 3;
  Sequence found{query.size(-3), arguments[at.query + 1].toTensor().size(-3),
                 is_causal(arguments, at), 1 + window_of(arguments[at.window_left])};
  if (are_packed) found.queries = std::min(found.queries, arguments[at.max_q].toInt());
  if (are_packed) found.keys = std::min(found.keys, arguments[at.max_q + 1].toInt());
  return found;
}

}  // namespace

double flops(std::string_view name, c10::ArrayRef<c10::IValue> arguments) {
  const bool backward = name.ends_with("_backward"), is_flash = name.starts_with("_flash_");
  const size_t first = backward ? 1 : 0;
  const auto& query = arguments[first].toTensor();
  const auto& key = arguments[first + 1].toTensor();
  const auto& value = arguments[first + 2].toTensor();
  const Sequence sequence =
      is_flash ? sequence_of_flash(arguments, backward ? kFlashBackward : kFlashForward)
               : Sequence{query.size(-2), key.size(-2), arguments[backward ? 13 : 5].toBool()};
  if (query.numel() == 0 || sequence.queries == 0) return 0;
  const auto size = static_cast<double>(query.size(-1));
  const auto value_size = static_cast<double>(value.size(-1));
  // scores and what they mix; backward scores again, and the gradients of the five operands
  const double of_pair = backward ? 3 * size + 2 * value_size : size + value_size;
  const double sequences =  // of all heads
      static_cast<double>(query.numel()) / size / static_cast<double>(sequence.queries);
  return 2 * sequences * sequence.pairs() * of_pair;
}

}  // namespace ditorch::attention
