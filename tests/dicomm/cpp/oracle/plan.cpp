#include "oracle/plan.h"

#include "support.h"

namespace dicomm::oracle {

using testing::mix;

namespace {

// Each use of the seed has a number of its own.
enum Purpose : std::uint64_t {
  kind_purpose = 1,
  failing,
  length,
  contents,
  rank_steps,
  collective
};

}  // namespace

EpochKind Plan::kind() const {
  const auto random = mix(settings.seed, epoch, kind_purpose) % 20;
  if (epoch < 4 || random > 1) return EpochKind::orderly;
  return random == 0 ? EpochKind::abort : EpochKind::leave;
}

int Plan::failing_rank() const {
  return static_cast<int>(mix(settings.seed, epoch, failing) % settings.ranks);
}

int Plan::failing_step() const {
  return static_cast<int>(mix(settings.seed, epoch, failing, 1) % kStepsAnEpoch);
}

std::uint64_t Plan::tag_value(int tag) const {
  constexpr std::uint64_t tags[kTags] = {0, 1, 77, 1ULL << 40, (1ULL << 63) - 1};
  return tags[tag];
}

std::size_t Plan::message_bytes(const Channel& channel, std::uint64_t sequence) const {
  if (sequence == kEndSequence) return kEndBytes;
  const std::size_t bytes = bytes_from(mix(settings.seed, epoch, length, channel.communicator,
                                           channel.from, channel.to, channel.tag, sequence));
  return bytes == kEndBytes ? bytes + 1 : bytes;
}

std::uint64_t Plan::message_key(const Channel& channel, std::uint64_t sequence) const {
  return mix(settings.seed, epoch, contents, channel.communicator, channel.from, channel.to,
             channel.tag, sequence);
}

std::uint64_t Plan::rank_seed(int rank) const {
  return mix(settings.seed, epoch, rank_steps, rank);
}

std::uint64_t Plan::collective_seed(int index) const {
  return mix(settings.seed, epoch, collective, index);
}

std::size_t bytes_from(std::uint64_t random) {
  constexpr std::size_t thresholds[] = {
      8, 64, 4096, 8 << 10, 64 << 10, 256 << 10, 1 << 20, (256 << 10) - 56, (8 << 10) - 56};
  const std::uint64_t choice = random % 1000;
  const std::uint64_t rest = random / 1000;
  if (choice < 60) return 0;
  if (choice < 500) return rest % 256;
  if (choice < 700) return rest % 20'000;
  if (choice < 880) return thresholds[rest % std::size(thresholds)] - 1 + rest / 64 % 3;
  if (choice < 990) return rest % (300 << 10);
  return rest % (kMaxBytes + 1);
}

}  // namespace dicomm::oracle
