#include "transport/verbs/transport.h"

#include <bit>
#include <cstdio>

#include "core/text.h"
#include "transport/verbs/endpoint.h"

namespace dicomm::verbs {

namespace {

constexpr const char* kName = "verbs";

static_assert(sizeof(TransportCard) == sizeof(Card));

TransportCard to_card(const Card& card) { return std::bit_cast<TransportCard>(card); }
Card from_card(const TransportCard& card) { return std::bit_cast<Card>(card); }

class VerbsDialler final : public Dialler {
 public:
  VerbsDialler(std::shared_ptr<Rails> rails, const std::vector<PublishedRail>& theirs)
      : endpoint_(std::move(rails), theirs) {}

  TransportCard card() const override { return to_card(endpoint_.card()); }
  std::unique_ptr<Stream> connect(Fd socket, Dialled dialled, const Deadline& deadline) override {
    endpoint_.connect(from_card(dialled.card));
    if (!endpoint_.finished()) endpoint_.call(socket, deadline);
    return endpoint_.stream(std::move(socket), true);
  }

 private:
  Endpoint endpoint_;
};

// Ready to receive before the dialler is.
class VerbsAcceptor final : public Acceptor {
 public:
  VerbsAcceptor(std::shared_ptr<Rails> rails, const Card& theirs)
      : endpoint_(std::move(rails), published(theirs)) {
    endpoint_.listen();
    endpoint_.connect(theirs);
  }

  TransportCard card() const override { return to_card(endpoint_.card()); }
  bool finished() const override { return endpoint_.finished(); }
  void finish(const Fd& socket, const Deadline& deadline) override {
    endpoint_.answer(socket, deadline);
  }
  std::unique_ptr<Stream> stream(Fd socket) override {
    return endpoint_.stream(std::move(socket), false);
  }

 private:
  Endpoint endpoint_;
};

class VerbsTransport final : public Transport {
 public:
  explicit VerbsTransport(std::shared_ptr<Rails> rails)
      : rails_(std::move(rails)),
        published_(rails_ ? rails_->published() : std::vector<PublishedRail>()) {}

  std::string contact_words() const override { return encode(published_); }
  std::string obstacle(const std::string&, const std::string& words) const override {
    const auto theirs = decode_rails(words);
    if (reachable(published_, theirs)) return {};
    return theirs.empty() ? " has no RDMA device"
                          : "'s RDMA devices and this rank's do not reach each other (InfiniBand "
                            "and Ethernet, RoCE v1 and v2, IPv4 and IPv6)";
  }
  std::unique_ptr<Dialler> dial(const std::string& words) override {
    return std::make_unique<VerbsDialler>(rails_, decode_rails(words));
  }
  bool wants(const TransportCard& card) const override { return from_card(card).version != 0; }
  std::unique_ptr<Acceptor> accept(const Caller& caller) override {
    if (!rails_) throw Error("a caller asked for verbs, which this rank has not");
    return std::make_unique<VerbsAcceptor>(rails_, from_card(caller.card));
  }
  void declare_memory(const MemoryRegion& region) override {
    if (rails_) rails_->memory->declare(region);
  }
  void forget_memory(std::uint64_t address, std::uint64_t bytes) override {
    if (rails_) rails_->memory->forget(address, bytes);
  }
  bool reaches_declared_memory() const override {
    return !rails_ || rails_->memory->reaches_declared();
  }

 private:
  const std::shared_ptr<Rails> rails_;  // null: there is no RDMA here, or it is not wanted
  const std::vector<PublishedRail> published_;
};

// RDMA devices are optional unless they are asked for.
std::shared_ptr<Rails> rails_for(const Options& options) {
  const bool asked = options.transport == kName;
  if (!asked && options.transport != kAnyTransport) return nullptr;
  const Settings wanted = settings(options);
  if (!asked && !devices_exist()) return nullptr;
  try {
    return open_rails(wanted, options.chip);
  } catch (const Error& error) {
    if (asked) throw Error(text("transport verbs was asked for: ", error.what()));
    std::fprintf(stderr, "dicomm: RDMA is not used: %s\n", error.what());
  }
  return nullptr;
}

class VerbsFactory final : public TransportFactory {
 public:
  const char* name() const override { return kName; }
  int preference() const override { return 1; }
  const char* door() const override { return "tcp"; }
  bool understands(const std::string& words) const override {
    decode_rails(words);
    return true;
  }
  std::unique_ptr<Transport> open(const Options& options) const override {
    return std::make_unique<VerbsTransport>(rails_for(options));
  }
};

}  // namespace

}  // namespace dicomm::verbs

namespace dicomm {

const TransportFactory& verbs_transport() {
  static const verbs::VerbsFactory factory;
  return factory;
}

}  // namespace dicomm
