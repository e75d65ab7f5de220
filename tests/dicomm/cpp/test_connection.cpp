// What one peer can make a rank hold, where the peer says frames that no dicomm would.
#include <doctest/doctest.h>

#include <list>

#include "core/connection.h"
#include "support.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

// Says what it is given, and takes nothing unless it listens.
class DeafStream final : public Stream {
 public:
  std::size_t write(const iovec* parts, int count) override {
    std::size_t bytes = 0;
    for (int i = 0; listens && i < count; ++i) bytes += parts[i].iov_len;
    return bytes;
  }
  bool take_back(std::uint64_t) override { return !peer_reads; }
  std::size_t read(void* data, std::size_t bytes) override {
    const std::size_t got = std::min(bytes, said_.size() - heard_);
    std::memcpy(data, said_.data() + heard_, got);
    heard_ += got;
    return got;
  }
  std::size_t eager_bytes() const override { return 1000; }
  int fd() const override { return -1; }
  LinkDescription describe() const override { return {}; }
  void finish_writing() override {}

  void say(FrameHeader header) {
    if (heard_ == said_.size()) said_.clear(), heard_ = 0;
    header.is_long = header.kind == FrameKind::offer;
    said_.append(reinterpret_cast<const char*>(&header), header.header_bytes());
    said_.append(header.payload_bytes(), 'p');
  }

  bool listens = false;
  bool peer_reads = false;  // what is offered, without asking

 private:
  std::string said_;
  std::size_t heard_ = 0;
};

struct Conversation {
  Ledger ledger;
  Matcher matcher;
  DeafStream* stream = new DeafStream;
  Connection connection{{1, 7, "", "h"}, std::unique_ptr<Stream>(stream), ledger, matcher};

  void hear(const FrameHeader& header) {
    stream->say(header);
    while (connection.receive()) {
    }
  }
};

// How often it could be said until the connection ended; why.
std::pair<std::size_t, std::string> said_until_the_end(const std::function<FrameHeader(int)>& frame,
                                                       std::size_t most) {
  Conversation conversation;
  for (std::size_t i = 0; i < most; ++i) try {
      conversation.hear(frame(static_cast<int>(i)));
    } catch (const StreamEnd& end) {
      return {i, end.reason};
    }
  return {most, ""};
}

}  // namespace

TEST_CASE("what a peer sends unasked is bounded, however it is cut") {
  for (const std::uint64_t bytes : {0, 1, 1000, 1 << 20}) {
    const auto [count, reason] = said_until_the_end(
        [&](int i) {
          return FrameHeader{
              .kind = FrameKind::eager, .tag = static_cast<std::uint64_t>(i), .bytes = bytes};
        },
        100'000);
    CHECK(count == kCreditBytes / (bytes + kMessageOverheadBytes));
    CHECK(contains(reason, "cut off"));
  }
}

TEST_CASE("what was received may be followed by as much again") {
  Conversation conversation;
  for (std::size_t sent = 0; sent < 3 * kCreditBytes; sent += 1000) {
    conversation.hear({.kind = FrameKind::eager, .tag = 5, .bytes = 1000});
    std::byte into[1000];
    RequestState request(nullptr, false, into, sizeof into, 1, 5);
    conversation.ledger.add(request);
    conversation.connection.receive_arrival(request, conversation.matcher.match(request));
    CHECK(request.done);
  }
}

TEST_CASE("offers are bounded, and so are those taken back while the peer reads no answer") {
  const auto [offers, why] = said_until_the_end(
      [](int i) {
        return FrameHeader{
            .kind = FrameKind::offer, .bytes = 1 << 20, .id = static_cast<std::uint32_t>(i)};
      },
      2 * kMaxOffers);
  CHECK(offers == kMaxOffers);
  CHECK(contains(why, "offers"));
  const auto [frames, why_too] = said_until_the_end(
      [](int i) {
        return FrameHeader{.kind = i % 2 ? FrameKind::cancel : FrameKind::offer,
                           .bytes = 1 << 20,
                           .id = static_cast<std::uint32_t>(i / 2)};
      },
      4 * kMaxOffers);
  CHECK(frames == 2 * kMaxOffers);
  CHECK(contains(why_too, "offers"));
}

TEST_CASE("what comes for a communicator that is over is dropped, and bounded are the answers") {
  Conversation conversation;
  conversation.matcher.end(7);
  for (std::size_t sent = 0; sent < 100 * kCreditBytes; sent += 100'000)
    conversation.hear({.kind = FrameKind::eager, .bytes = 100'000, .context = 7});
  std::size_t offers = 0;
  try {
    for (; offers < 2 * kMaxOffers; ++offers)
      conversation.hear({.kind = FrameKind::offer, .bytes = 1 << 20, .context = 7});
  } catch (const StreamEnd& end) {
    CHECK(contains(end.reason, "offers"));
  }
  CHECK(offers == kMaxOffers);
  Matcher& matcher = conversation.matcher;
  std::byte into[1];
  RequestState request(nullptr, false, into, sizeof into, 1, 0);
  request.context = 7;
  CHECK(matcher.match(request) == nullptr);
  request.done = true;
}

TEST_CASE("taking back what was never offered makes nobody answer") {
  Conversation conversation;
  for (std::uint32_t id = 0; id < 100; ++id)
    conversation.hear({.kind = FrameKind::cancel, .id = id});
  CHECK_FALSE(conversation.connection.has_output());
}

TEST_CASE("a sender keeps to the bound itself: one more offer fails alone, in a sentence") {
  Conversation conversation;
  std::list<RequestState> sends;
  const auto send = [&]() -> RequestState& {
    sends.emplace_back(nullptr, true, nullptr, 1001, 1, 9);
    conversation.ledger.add(sends.back());
    conversation.connection.send_message(sends.back());
    return sends.back();
  };
  for (std::size_t i = 0; i < kMaxOffers; ++i) CHECK_FALSE(send().done);
  RequestState& refused = send();
  REQUIRE(refused.done);
  CHECK_THROWS_WITH_AS(refused.wait({}), doctest::Contains("wait there for a receive already"),
                       Error);
  conversation.hear({.kind = FrameKind::done, .id = sends.front().id});
  CHECK_FALSE(send().done);
  conversation.connection.release_all();
  for (RequestState& request : sends)
    if (!request.done) conversation.ledger.finish(request, 0);
}

TEST_CASE("a message that was given up is not sent, though the peer accepts it meanwhile") {
  for (const bool peer_reads : {false, true}) {
    Conversation conversation;
    conversation.stream->listens = true;
    conversation.stream->peer_reads = peer_reads;
    Bytes data(1 << 20);
    RequestState send(nullptr, true, data.data(), data.size(), 1, 9);
    conversation.ledger.add(send);
    conversation.connection.send_message(send);
    CHECK(conversation.connection.flush());
    CHECK(conversation.connection.release(send) == !peer_reads);
    Ledger::doom(send, Outcome::aborted, "given up");
    if (!peer_reads) conversation.ledger.finish(send, 0);
    CHECK(conversation.connection.flush());
    conversation.hear({.kind = FrameKind::accept, .id = send.id});
    CHECK(send.done);
    CHECK_FALSE(conversation.connection.has_output());
  }
}

TEST_CASE("a peer joins a group once, and so many at most") {
  const auto [same, why] = said_until_the_end(
      [](int i) {
        return FrameHeader{.kind = i % 2 ? FrameKind::leave : FrameKind::join, .context = 7};
      },
      100);
  CHECK(same == 2);
  CHECK(contains(why, "a group joined twice"));
  const auto [others, why_too] = said_until_the_end(
      [](int i) {
        return FrameHeader{.kind = FrameKind::join, .context = static_cast<std::uint32_t>(i)};
      },
      2 * kMaxContexts);
  CHECK(others == kMaxContexts);
  CHECK(contains(why_too, "groups"));
}
