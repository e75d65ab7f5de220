// A verbs connection whose peer sends anything, through its queue pairs and through the socket.
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/contact.h"
#include "fake_verbs.h"
#include "transport/verbs/endpoint.h"

namespace {

using namespace dicomm;
using namespace dicomm::testing;

class Session {
 public:
  explicit Session(FuzzedDataProvider& input) : input_(input) {
    const auto our_rails = fake_rails({&nics_[0], &nics_[1]}, 1);
    const auto their_rails = fake_rails({&nics_[2], &nics_[3]}, 2);
    verbs::Endpoint ours(our_rails, their_rails->published());
    theirs_.emplace(their_rails, our_rails->published());
    card_ = ours.card();
    verbs::Card card = theirs_->card();
    if (input.ConsumeBool()) change(card);
    verbs::published(card);
    ours.connect(card);
    int both[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) != 0)
      std::abort();
    peer_ = Fd(both[0]);
    stream_ = ours.stream(Fd(both[1]), input.ConsumeBool());
  }

  void run() {
    while (input_.remaining_bytes() > 0) act();
  }

 private:
  void change(verbs::Card& card) {
    const auto at = input_.ConsumeIntegralInRange<std::size_t>(0, sizeof card - 1);
    reinterpret_cast<std::uint8_t*>(&card)[at] = input_.ConsumeIntegral<std::uint8_t>();
  }

  void act() {
    static std::byte scratch[50'000];
    switch (input_.ConsumeIntegralInRange<int>(0, 8)) {
      case 0:
      case 1:
        return send_slot(false);
      case 2:
        return send_slot(true);
      case 3: {
        const auto words = input_.ConsumeRandomLengthString(100);
        (void)!::send(peer_.get(), words.data(), words.size(), MSG_NOSIGNAL);
        return stream_->on_event();
      }
      case 4: {
        const auto wanted = input_.ConsumeIntegralInRange<std::size_t>(0, sizeof scratch);
        if (stream_->read(scratch, wanted) > wanted) std::abort();
        return;
      }
      case 5: {
        const iovec part{scratch, input_.ConsumeIntegralInRange<std::size_t>(0, sizeof scratch)};
        if (stream_->write(&part, 1) > part.iov_len) std::abort();
        return;
      }
      case 6:
        return pull();
      case 7:
        stream_->prepare_sleep(input_.ConsumeBool());
        stream_->woke();
        return stream_->on_event();
      case 8:
        if (input_.ConsumeIntegralInRange<int>(0, 20) == 7) stream_->withdraw();
        return;
    }
  }

  // Mostly what a peer could say, now and then what none would.
  void send_slot(bool by_socket) {
    verbs::SlotHeader header{};
    header.sequence = input_.ConsumeBool() ? next_++ : input_.ConsumeIntegral<std::uint32_t>();
    header.consumed = input_.ConsumeIntegral<std::uint8_t>();
    header.consumed_here = input_.ConsumeIntegral<std::uint8_t>();
    header.consumed_rail = input_.ConsumeIntegralInRange<std::uint8_t>(0, 9);
    header.rails_up = input_.ConsumeIntegral<std::uint8_t>();
    header.magic = input_.ConsumeIntegralInRange<int>(0, 20) == 7 ? 0 : verbs::kSlotMagic;
    std::string words(reinterpret_cast<const char*>(&header), sizeof header);
    words += std::string(input_.ConsumeIntegralInRange<std::size_t>(0, 9000), 'p');
    if (input_.ConsumeIntegralInRange<int>(0, 20) == 7)
      words.resize(input_.ConsumeIntegralInRange<std::size_t>(0, words.size()));
    if (!by_socket) {
      const int rail = input_.ConsumeIntegralInRange<int>(0, 1);
      std::optional<std::uint32_t> immediate;
      if (input_.ConsumeBool()) immediate = input_.ConsumeIntegral<std::uint16_t>();
      deliver(card_.rail[rail].qp_number, words.data(), static_cast<std::uint32_t>(words.size()),
              immediate);
      return;
    }
    verbs::SocketMessage message{verbs::SocketMessage::slot,
                                 static_cast<std::uint32_t>(words.size())};
    if (input_.ConsumeIntegralInRange<int>(0, 10) == 7)
      message.bytes = input_.ConsumeIntegral<std::uint32_t>();
    if (input_.ConsumeIntegralInRange<int>(0, 10) == 7)
      message.kind =
          static_cast<verbs::SocketMessage::Kind>(input_.ConsumeIntegralInRange<int>(0, 3));
    words.insert(0, reinterpret_cast<const char*>(&message), sizeof message);
    (void)!::send(peer_.get(), words.data(), words.size(), MSG_NOSIGNAL);
    stream_->on_event();
  }

  void pull() {
    static std::byte into[200'000];
    Pull pull{next_pull_++,
              into,
              input_.ConsumeIntegral<std::uint64_t>(),
              input_.ConsumeIntegralInRange<std::uint64_t>(1, sizeof into),
              {}};
    pull.keys[0] = input_.ConsumeIntegral<std::uint32_t>();
    pull.keys[1] = input_.ConsumeIntegral<std::uint8_t>();
    if (!stream_->can_pull(pull)) return;
    for (int turns = input_.ConsumeIntegralInRange<int>(0, 3); turns > 0 && !pull.done(); --turns)
      stream_->pull(pull, true);
    if (!pull.done()) stream_->abandon(pull);
  }

  FuzzedDataProvider& input_;
  FakeNic nics_[4] = {FakeNic("a"), FakeNic("b"), FakeNic("c"), FakeNic("d")};
  std::optional<verbs::Endpoint> theirs_;  // it only takes what is sent to it
  verbs::Card card_{};
  Fd peer_;
  std::unique_ptr<Stream> stream_;
  std::uint32_t next_ = 1;
  std::uint32_t next_pull_ = 1;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  FuzzedDataProvider input(data, bytes);
  try {
    Session(input).run();
  } catch (const StreamEnd&) {
  } catch (const Error&) {
  }
  return 0;
}
