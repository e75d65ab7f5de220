// Shared memory whose other side writes anything into it: counters, flags, bytes.
#include <fcntl.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/communicator.h"
#include "transport/shm/lane.h"
#include "transport/shm/shm.h"

namespace {

using namespace dicomm;

constexpr std::size_t kRest = offsetof(Lane, joint);  // after the ring

// One segment for all inputs; its counters start at zero for each.
struct Segment {
  Fd fd = make_segment();
  std::size_t bytes = 0;
  std::byte* memory = nullptr;

  Segment() {
    struct stat status{};
    ::fstat(fd.get(), &status);
    bytes = status.st_size;
    memory = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
    if (memory == MAP_FAILED) std::abort();
  }

  void reset() {
    for (std::size_t lane = 0; lane + sizeof(Lane) <= bytes; lane += sizeof(Lane)) {
      std::memset(memory + lane, 0, offsetof(Ring, data));
      std::memset(memory + lane + kRest, 0, sizeof(Lane) - kRest);
    }
  }
};

void write_anything(FuzzedDataProvider& input, Segment& segment) {
  // Mostly where the counters are.
  const std::size_t lane = input.ConsumeBool() ? sizeof(Lane) : 0;
  const auto [first, end] = input.PickValueInArray<std::pair<std::size_t, std::size_t>>(
      {{0, offsetof(Ring, data)}, {kRest, sizeof(Lane)}, {0, sizeof(Lane)}});
  const std::size_t at =
      lane + input.ConsumeIntegralInRange<std::size_t>(first / 8, end / 8 - 1) * 8;
  std::uint64_t value = input.ConsumeIntegral<std::uint64_t>();
  if (input.ConsumeBool()) {  // close to what is there
    std::memcpy(&value, segment.memory + at, 8);
    value += input.ConsumeIntegral<std::int8_t>();
  }
  std::memcpy(segment.memory + at, &value, 8);
}

// Long messages, one of each direction at a time.
struct Messages {
  static constexpr std::size_t kMost = 2 << 20;

  std::byte* into = memory();
  std::byte* from = memory();
  std::uint64_t offers = 0;
  std::optional<Pull> pull;

  static std::byte* memory() { return static_cast<std::byte*>(std::calloc(1, kMost)); }
  ~Messages() { std::free(into), std::free(from); }
};

void pull(FuzzedDataProvider& input, Stream& stream, Messages& messages) {
  auto& pull = messages.pull;
  if (!pull) {
    pull = Pull{1,
                messages.into,
                input.ConsumeBool() ? reinterpret_cast<std::uint64_t>(messages.from)
                                    : input.ConsumeIntegral<std::uint64_t>(),
                input.ConsumeIntegralInRange<std::uint64_t>(1, Messages::kMost),
                {}};
    if (!stream.can_pull(*pull)) return pull.reset();
  }
  if (input.ConsumeIntegralInRange<int>(0, 9) == 7) {
    if (stream.abandon(*pull)) pull.reset();
    return;
  }
  const Pulled how = stream.pull(*pull, input.ConsumeBool());
  if (pull->moved > pull->bytes) std::abort();
  if (how == Pulled::withdrawn || how == Pulled::refused || pull->done()) pull.reset();
}

void use(FuzzedDataProvider& input, Segment& segment, Stream& stream, const Fd& peer,
         Messages& messages) {
  static std::byte scratch[300'000];
  switch (input.ConsumeIntegralInRange<int>(0, 10)) {
    case 0:
    case 1:
    case 2:
      return write_anything(input, segment);
    case 3: {
      const auto wanted = input.ConsumeIntegralInRange<std::size_t>(0, sizeof scratch);
      if (stream.read(scratch, wanted) > wanted) std::abort();
      return;
    }
    case 4: {
      const iovec parts[2] = {{scratch, input.ConsumeIntegralInRange<std::size_t>(0, 100)},
                              {scratch, input.ConsumeIntegralInRange<std::size_t>(0, 280'000)}};
      if (stream.write(parts, 2) > parts[0].iov_len + parts[1].iov_len) std::abort();
      return;
    }
    case 5:
      stream.prepare_sleep(input.ConsumeBool());
      return stream.woke();
    case 6:
      return pull(input, stream, messages);
    case 7:
      (void)!::send(peer.get(), "bell", 1 + input.ConsumeIntegralInRange<int>(0, 3),
                    MSG_DONTWAIT | MSG_NOSIGNAL);
      return stream.on_event();
    case 8:
      if (input.ConsumeIntegralInRange<int>(0, 20) != 7) return;
      stream.withdraw();
      return messages.pull.reset();
    case 9:
      stream.expose(messages.offers++ % 3, messages.from,
                    input.ConsumeIntegralInRange<std::size_t>(1, Messages::kMost));
      return;
    case 10:
      stream.push();
      return;
  }
}

// A segment that the peer made: whatever is mapped must stay there.
void take_strange_segment(FuzzedDataProvider& input) {
  static const std::size_t right_bytes = 2 * sizeof(Lane);
  Fd segment(::memfd_create("strange", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto bytes =
      input.ConsumeBool() ? right_bytes : input.ConsumeIntegralInRange<std::size_t>(0, 1 << 20);
  if (!segment || ::ftruncate(segment.get(), static_cast<off_t>(bytes)) != 0) std::abort();
  ::fcntl(segment.get(), F_ADD_SEALS, input.ConsumeIntegralInRange<int>(0, 31));
  const Fd peers(::dup(segment.get()));
  int both[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) != 0) std::abort();
  const Fd socket(both[1]);
  try {
    const auto stream = shm_stream(Fd(both[0]), std::move(segment), input.ConsumeBool());
    if (bytes != right_bytes || ::ftruncate(peers.get(), 0) == 0) std::abort();
    std::byte byte{};
    stream->read(&byte, 1);
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  static Segment segment;
  FuzzedDataProvider input(data, bytes);
  if (input.ConsumeIntegralInRange<int>(0, 100) == 7) {
    take_strange_segment(input);
    return 0;
  }
  segment.reset();
  Messages messages;  // longer than the stream
  int both[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) != 0) std::abort();
  const Fd peer(both[1]);
  const auto stream = shm_stream(Fd(both[0]), Fd(::dup(segment.fd.get())), input.ConsumeBool());
  try {
    while (input.remaining_bytes() > 0) use(input, segment, *stream, peer, messages);
  } catch (const StreamEnd&) {
  }
  return 0;
}
