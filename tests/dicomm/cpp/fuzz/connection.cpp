// A Connection whose peer says anything at any moment, while messages are sent, received and
// cancelled here. The sanitizers see to the memory; the end sees to it that all requests end.
#include "core/connection.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace dicomm;

void expect(bool holds) {
  if (!holds) std::abort();
}

class FuzzedStream final : public Stream {
 public:
  explicit FuzzedStream(FuzzedDataProvider& input)
      : input_(input), pulls_(input.ConsumeBool()), background_(input.ConsumeBool()) {}

  std::size_t write(const iovec* parts, int count) override {
    std::size_t room = input_.ConsumeIntegralInRange<std::size_t>(0, 3 << 20), sent = 0;
    for (int i = 0; i < count; ++i) {
      const std::size_t bytes = std::min(room, parts[i].iov_len);
      written_.resize(std::max(written_.size(), bytes));
      if (bytes > 0) std::memcpy(written_.data(), parts[i].iov_base, bytes);
      room -= bytes;
      sent += bytes;
    }
    return sent;
  }

  std::size_t read(void* data, std::size_t bytes) override {
    if (heard_ == said_.size() && over_) throw StreamEnd{"over"};
    const std::size_t got = std::min(bytes, said_.size() - heard_);
    std::memcpy(data, said_.data() + heard_, got);
    heard_ += got;
    return got;
  }

  std::size_t eager_bytes() const override { return 1000; }
  bool can_pull(const Pull&) override { return pulls_; }
  bool pulls_in_background() const override { return background_; }
  std::size_t concurrent_pulls() const override { return background_ ? 4 : 1; }
  Pulled pull(Pull& pull, bool) override {
    const auto bytes = std::min<std::uint64_t>(pull.bytes - pull.moved,
                                               input_.ConsumeIntegralInRange<int>(0, 100'000));
    std::memset(pull.data + pull.moved, 1, bytes);
    pull.moved += bytes;
    const int how = input_.ConsumeIntegralInRange<int>(0, 30);
    return how == 7 ? Pulled::withdrawn : how == 8 ? Pulled::refused : Pulled::moved;
  }
  bool abandon(Pull&) override { return !background_ || input_.ConsumeBool(); }
  bool take_back(std::uint64_t) override { return input_.ConsumeBool(); }
  bool is_within_host() const override { return pulls_; }
  int fd() const override { return -1; }
  LinkDescription describe() const override { return {}; }
  void finish_writing() override {}

  void say(const void* words, std::size_t bytes) {
    said_.append(static_cast<const char*>(words), bytes);
  }
  void end() { over_ = true; }

 private:
  FuzzedDataProvider& input_;
  const bool pulls_, background_;
  bool over_ = false;
  std::string said_;
  std::size_t heard_ = 0;
  std::vector<std::byte> written_;
};

// A chip that may not reach the peer's memory, and copies as long as it likes.
class FuzzedChip final : public ChipBuffer {
 public:
  FuzzedChip(FuzzedDataProvider& input, std::byte* host, std::size_t bytes)
      : input_(input), host_(host), bytes_(bytes) {}

  const MemoryHandle& handle() const override { return handle_; }
  std::shared_ptr<ChipWork> pull(const MemoryHandle&, std::size_t bytes) override {
    expect(bytes <= bytes_);
    return input_.ConsumeBool() ? std::make_shared<Copy>(input_) : nullptr;
  }
  OnHost on_host() override {
    return {host_, input_.ConsumeBool() ? std::make_shared<Copy>(input_) : nullptr};
  }

 private:
  class Copy final : public ChipWork {
   public:
    explicit Copy(FuzzedDataProvider& input) : input_(input) {}
    bool done() override { return input_.ConsumeBool(); }

   private:
    FuzzedDataProvider& input_;
  };

  FuzzedDataProvider& input_;
  std::byte* const host_;
  const std::size_t bytes_;
  const MemoryHandle handle_{};
};

class Session {
 public:
  explicit Session(FuzzedDataProvider& input)
      : input_(input),
        stream_(new FuzzedStream(input)),
        connection_({1, 7, "", "h"}, std::unique_ptr<Stream>(stream_), ledger_, matcher_) {}

  ~Session() {
    if (!connection_.ended()) connection_.end();
    for (const auto& call : calls_) finish(call->request);
  }

  void run() {
    try {
      while (input_.remaining_bytes() > 0 && !connection_.has_left()) act();
    } catch (const StreamEnd&) {
    }
  }

 private:
  struct Call {
    Call(FuzzedDataProvider& input, bool is_send, std::size_t bytes, int peer, std::uint64_t tag,
         bool in_chip)
        : buffer(new std::byte[bytes]),
          request(nullptr, is_send, in_chip ? nullptr : buffer.get(), bytes, peer, tag) {
      if (in_chip) request.chip = std::make_shared<FuzzedChip>(input, buffer.get(), bytes);
    }

    const std::unique_ptr<std::byte[]> buffer;
    RequestState request;
  };

  void act() {
    switch (input_.ConsumeIntegralInRange<int>(0, 11)) {
      case 0:
        return post();
      case 1:
        return send();
      case 2:
      case 3:
      case 4:
        return hear_frame();
      case 5: {
        const auto words = input_.ConsumeRandomLengthString(200);
        in_step_ = false;
        return stream_->say(words.data(), words.size());
      }
      case 6:
      case 7:
        hear();
        return;
      case 8:
        connection_.copy(true);
        return;
      case 9:
        connection_.flush();
        return;
      case 10:
        return cancel();
      case 11:
        return rarely();
    }
  }

  void rarely() {
    switch (input_.ConsumeIntegralInRange<int>(0, 9)) {
      case 0:
        return stream_->end();
      case 1:
        return connection_.send_abort(0, "because");
      case 2:
        return connection_.send_goodbye();
      case 3:  // as in Requests::fail_all()
        for (const auto& arrival : matcher_.end(0)) connection_.turn_down(*arrival);
        for (const auto& call : calls_) give_up(call->request);
        return forget_finished();
      case 4:
        return flood();
      default:
        return;
    }
  }

  std::size_t length() {
    constexpr std::size_t lengths[] = {0, 1, 16, 999, 1000, 1001, 5000};
    const bool long_one = input_.ConsumeIntegralInRange<int>(0, 60) == 7;  // they cost time
    return long_one ? kChunkBytes + 5 : input_.PickValueInArray(lengths);
  }

  RequestState& add(bool is_send, int peer) {
    const std::size_t bytes = length();
    const int tag = input_.ConsumeIntegralInRange<int>(0, 3);
    calls_.push_back(
        std::make_unique<Call>(input_, is_send, bytes, peer, tag, input_.ConsumeBool()));
    ledger_.add(calls_.back()->request);
    return calls_.back()->request;
  }

  void post() {
    RequestState& request = add(false, input_.ConsumeBool() ? 1 : Communicator::any_source);
    if (const auto arrival = matcher_.match(request))
      connection_.receive_arrival(request, arrival);
    else
      matcher_.post(request);
  }

  void send() { connection_.send_message(add(true, 1)); }

  // More than a peer may send of what nobody receives: it has to be cut off. Where the peer was in
  // the midst of something else, this may be its payload.
  void flood() {
    constexpr std::uint64_t lengths[] = {0, 1, 1000, 70'000};
    FrameHeader header;
    header.context = 10;  // which never ends here: nothing of one that ended is kept
    header.tag = 77;
    header.bytes = input_.PickValueInArray(lengths);
    header.kind = FrameKind::eager;
    std::size_t count = kCreditBytes / (header.bytes + kMessageOverheadBytes) + 1;
    if (input_.ConsumeIntegralInRange<int>(0, 100) == 7) {  // takes longer
      header.kind = FrameKind::offer;
      header.is_long = 1;
      count = kMaxOffers + 1;
    }
    const std::string payload(header.payload_bytes(), 'p');
    for (header.id = 1000; header.id < 1000 + count; ++header.id) {
      stream_->say(&header, header.header_bytes());
      stream_->say(payload.data(), payload.size());
    }
    while (hear()) {
    }
    const bool dropped = header.kind == FrameKind::eager && matcher_.has_ended(0);
    expect(!in_step_ || connection_.has_left() || dropped);
  }

  // Answers as Engine::peer_said() and Requests::peer_joined() do.
  bool hear() {
    const bool more = connection_.receive();
    for (const Connection::Word& word : connection_.take_words())
      if (word.kind == FrameKind::join)
        word.context % 2 ? connection_.send_leave(word.context)
                         : connection_.send_abort(word.context, "gone");
    return more;
  }

  void hear_frame() {
    FrameHeader header;
    header.kind = static_cast<FrameKind>(input_.ConsumeIntegralInRange<int>(0, 13));
    if (header.kind == FrameKind::join || header.kind == FrameKind::leave)
      header.context = input_.ConsumeIntegralInRange<int>(0, 9);
    header.tag = input_.ConsumeIntegralInRange<int>(0, 3);
    header.bytes = input_.ConsumeBool() ? length() : input_.ConsumeIntegral<std::uint64_t>();
    header.id = input_.ConsumeIntegralInRange<int>(0, 6);
    header.credit = input_.ConsumeBool() ? 0 : input_.ConsumeIntegral<std::uint64_t>();
    header.is_long = input_.ConsumeIntegralInRange<int>(0, 2);
    stream_->say(&header, header.header_bytes());
    const std::size_t payload = std::min<std::uint64_t>(header.payload_bytes(), 2 << 20);
    const std::string words(input_.ConsumeBool() ? payload : payload / 2, 'p');
    if (words.size() < header.payload_bytes()) in_step_ = false;
    stream_->say(words.data(), words.size());
  }

  void give_up(RequestState& request) {
    if (request.done) return;
    const bool reached = request.peer_number == 1;
    if (!reached || connection_.release(request))
      ledger_.fail(request, Outcome::aborted, "gone");
    else
      Ledger::doom(request, Outcome::aborted, "gone");
  }

  // As in Requests::cancel(), which waits where the buffer is still in use.
  void cancel() {
    forget_finished();
    if (calls_.empty()) return;
    const auto index = input_.ConsumeIntegralInRange<std::size_t>(0, calls_.size() - 1);
    RequestState& request = calls_[index]->request;
    if (!request.is_send) matcher_.remove(request);
    if (request.peer_number == 1 && !connection_.release(request)) return;
    if (!request.done) ledger_.finish(request, 0);
    calls_.erase(calls_.begin() + index);
  }

  void forget_finished() {
    std::erase_if(calls_, [](const auto& call) {
      if (!call->request.done) return false;
      expect(call->request.moved <= call->request.bytes);
      return true;
    });
  }

  void finish(RequestState& request) {
    if (request.done) return;
    matcher_.remove(request);
    ledger_.fail(request, Outcome::peer_error, "over");
  }

  FuzzedDataProvider& input_;
  Ledger ledger_;
  Matcher matcher_;
  std::vector<std::unique_ptr<Call>> calls_;
  FuzzedStream* stream_;
  Connection connection_;
  bool in_step_ = true;  // the peer said whole frames so far
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  FuzzedDataProvider input(data, bytes);
  Session(input).run();
  return 0;
}
